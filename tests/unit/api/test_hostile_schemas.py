"""Schemas that are invalid, allow no answer, or try to take long."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from tests.support import clock
from tests.support.byte_walk import answer
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.constrain.keywords import NOT_ENFORCED
from worker.api.chat.request import JsonSchema
from worker.errors import InvalidRequest


def enforced(schema: Any) -> str:
    return constrain(JsonSchema(schema, "s")).constraint.grammar


def refused_fields(schema: Any) -> list[str]:
    with pytest.raises(InvalidRequest) as refused:
        constrain(JsonSchema(schema, "s"))
    return [fault["field"] for fault in refused.value.details["errors"]]


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
    assert refused_fields(schema) == [field]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "("},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"allOf": [{"type": "null"}, {"type": "string"}]},
    ],
)
def test_a_schema_without_an_answer_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="s cannot be enforced: ") as refused:
        answer(enforced(schema), seed=1)
    assert "%json" not in refused.value.message, "the client wrote no Lark"


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
ENDLESS = {
    "itself": ({"$ref": "#"}, "s.$ref"),
    "each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "s.$ref",
    ),
    "behind a first token": (
        {"$defs": {"x": {"$ref": "#/$defs/x"}}, "properties": {"a": {"$ref": "#/$defs/x"}}},
        "s.properties.a.$ref",
    ),
    "a required member": (
        {"$defs": {"node": NODE | {"required": ["next"]}}, "items": {"$ref": "#/$defs/node"}},
        "s.items.$ref",
    ),
    "any other member": (
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        "s.additionalProperties.$ref",
    ),
    "items": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "s.items.$ref"),
    "a part of a list": (
        {"type": "array", "prefixItems": [{"$ref": "#"}]},
        "s.prefixItems[0].$ref",
    ),
    "each branch": ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "s.anyOf[0].$ref"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_whose_values_never_end_is_refused_by_the_reference(name: str) -> None:
    schema, field = ENDLESS[name]
    assert field in refused_fields(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 0},
        {"required": ["a"], "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "string"}]}}},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "null"},
    ],
)
def test_a_schema_that_refers_to_itself_and_ends_is_followed(schema: Any) -> None:
    assert answer(enforced(schema), seed=3) != ""


def ladder(levels: int, step: Any) -> dict[str, Any]:
    """Return definitions that each use the next one twice."""
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
    "endless pattern": {"type": "string", "pattern": "^x{4294967295}$"},
    "length of a pattern": {"type": "string", "pattern": "^x*$", "minLength": 200_000},
    "many patterns": {"properties": {f"p{i}": {"pattern": f"^{i}x{{19000}}$"} for i in range(300)}},
    "look-behind by states": {"type": "string", "pattern": "(.*a.{200})"},
    "long pattern": {"type": "string", "pattern": "(?i)" + "abc" * 1300},
    "keywords that are not enforced": {
        "properties": {
            f"p{i}": {"type": "array", **dict.fromkeys(sorted(NOT_ENFORCED), {"type": "string"})}
            for i in range(480)
        }
    },
    "length": {"type": "string", "minLength": 999_999, "maxLength": 1_000_000},
    "items": {"type": "array", "minItems": 999_999},
}


def test_long_names_do_not_become_long_paths() -> None:
    inner: dict[str, Any] = {f"p{i}": {"not": {}, "if": {}} for i in range(400)}
    found = constrain(JsonSchema({"properties": {"x" * 100_000: {"properties": inner}}}, "s"))
    assert sum(map(len, found.not_enforced)) < 400 * 800


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_takes_no_time(name: str) -> None:
    """100 ms is the bound on an idle machine; three tries and room for a busy one."""
    times = []
    for _ in range(3):
        began = time.process_time()
        with suppress(InvalidRequest):
            answer(enforced(HOSTILE[name]), seed=1, max_bytes=1)
        times.append(time.process_time() - began)
    assert clock.within(min(times), 0.15)
