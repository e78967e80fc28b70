"""Schemas that are none, allow no answer, or were made to take long."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.byte_walk import answer
from worker.api.chat.constrain.constraints import json_schema
from worker.errors import InvalidRequest


def enforced(schema: Any) -> str:
    asked = json_schema(schema, "s")
    assert not asked.faults and asked.constraint is not None, asked.faults
    return asked.constraint.grammar


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"required": [["a"]]}, "s.required"),
        ({"required": [1]}, "s.required"),
        ({"type": [["x"]]}, "s.type"),
        ({"type": "text"}, "s.type"),
        ({"type": []}, "s.type"),
        ({"enum": []}, "s.enum"),
        ({"properties": [1]}, "s.properties"),
        ({"properties": {"a": 5}}, "s.properties.a"),
        ({"items": "x"}, "s.items"),
        ({"anyOf": {}}, "s.anyOf"),
        ({"minimum": "1"}, "s.minimum"),
        ({"minLength": -1}, "s.minLength"),
        ({"multipleOf": 0}, "s.multipleOf"),
        ({"pattern": 1}, "s.pattern"),
        ({"format": []}, "s.format"),
        ({"$ref": "#/$defs/no"}, "s.$ref"),
        ({"$ref": "https://example.org/schema"}, "s.$ref"),
        ({"$ref": ["#"]}, "s.$ref"),
        (False, "s"),
        ([], "s"),
        ("x", "s"),
        ({"enum": [f"value{i}" for i in range(100_000)]}, "s"),
        ({"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}, "s"),
        ({"description": "x" * 300_000}, "s"),
    ],
)
def test_a_schema_that_cannot_be_one_is_refused_by_its_field(schema: Any, field: str) -> None:
    assert [fault["field"] for fault in json_schema(schema, "s").faults] == [field]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "("},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"allOf": [{"type": "null"}, {"type": "string"}]},
    ],
)
def test_a_schema_without_an_answer_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="s cannot be enforced"):
        answer(enforced(schema), seed=1)


def ladder(levels: int, step: Any) -> dict[str, Any]:
    """Definitions that each use the next one twice."""
    defs = {f"l{i}": step({"$ref": f"#/$defs/l{i + 1}"}, i) for i in range(levels)}
    defs[f"l{levels}"] = {"type": "string"}
    return {"$defs": defs, "$ref": "#/$defs/l0"}


def nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "members": ladder(32, lambda r, i: {"properties": {"a": r, "b": r}}),
    "any": ladder(32, lambda r, i: {"anyOf": [r, r]}),
    "all": ladder(32, lambda r, i: {"allOf": [r, r]}),
    "lengths": ladder(32, lambda r, i: {"anyOf": [r, r], "maxLength": 50 + i}),
    "merged": ladder(26, lambda r, i: {"allOf": [{"properties": {f"a{i}": r}}] * 2}),
    "chain": ladder(3000, lambda r, i: r),
    "chain of arrays": ladder(150, lambda r, i: {"items": r}),
    "nested": nested(400),
    "nested as deep as is taken": nested(45),
    "values": {"enum": [f"value{i}" for i in range(5000)]},
    "long values": {"enum": ["x" * 4000 + str(i) for i in range(50)]},
    "properties": {"properties": {f"p{i}": {"type": "string", "maxLength": 9} for i in range(500)}},
    "product": {
        "allOf": [
            {"anyOf": [{"properties": {f"q{j}{i}": {"type": "string"}}} for i in range(6)]}
            for j in range(8)
        ]
    },
    "multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103)]},
    "repeated pattern": {"type": "string", "pattern": r"^((\w{1,200}\s){1,200}){1,200}$"},
    "look-behind by states": {"type": "string", "pattern": "(.*a.{200})"},
    "long pattern": {"type": "string", "pattern": "(?i)" + "abc" * 1300},
    "length": {"type": "string", "minLength": 999_999, "maxLength": 1_000_000},
    "items": {"type": "array", "minItems": 999_999},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_takes_no_time(name: str) -> None:
    """100 ms is the bound on an idle machine; three tries and room for a busy one."""
    times = []
    for _ in range(3):
        began = time.process_time()
        asked = json_schema(HOSTILE[name], "s")
        if asked.constraint is not None:
            try:
                answer(asked.constraint.grammar, seed=1, max_bytes=1)
            except InvalidRequest:
                pass
        times.append(time.process_time() - began)
    assert min(times) < 0.15
