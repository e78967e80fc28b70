"""Schemas: enforced answers are valid, unenforced keywords are named, and bad schemas are
refused."""

from __future__ import annotations

import json
from copy import deepcopy
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, StringConstraints

from tests.support.byte_walk import accepts, answer
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.request import JsonSchema
from worker.errors import InvalidRequest

SAFE = 2**53 - 1
ZODS = json.loads((Path(__file__).parents[2] / "data/zod_schemas.json").read_text())
"""Values, and their schemas as zod 4.6.7 writes them for both drafts."""


def enforced(schema: Any) -> tuple[str, tuple[str, ...]]:
    """Return the grammar for a schema that must be accepted, and the keywords that it omits."""
    found = constrain(JsonSchema(schema, "s"))
    return found.constraint.grammar, found.not_enforced


def holds(schema: Any, value: Any) -> bool:
    grammar, left_out = enforced(schema)
    assert left_out == ()
    return accepts(grammar, json.dumps(value, ensure_ascii=False))


# --- every forced output is valid ------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "ü", 'q"', "a b", "$ref", "0"])
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=4)
SCALARS: Any = st.none() | st.booleans() | st.integers(-999, 999) | TEXT
BOUND = st.integers(-1000, 1000) | st.floats(-100, 100, width=16) | st.just(SAFE)
PATTERNS = st.sampled_from(
    ["^a", "b$", "^[a-c]{1,3}$", r"^\d{2}-\d{2}$", "x", "^(yes|no)$", r"^\S+@\S+$", "^$|^a", "[^ü]"]
)


def numbers() -> Any:
    keys = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    return st.builds(
        lambda kind, bounds, step: {"type": kind, **bounds, **step},
        st.sampled_from(["integer", "number"]),
        st.dictionaries(st.sampled_from(keys), BOUND, max_size=2),
        st.just({}) | st.sampled_from([2, 5, 7]).map(lambda n: {"multipleOf": n}),
    )


def strings() -> Any:
    lengths = st.tuples(st.integers(0, 3), st.integers(3, 8)).map(
        lambda found: {"minLength": found[0], "maxLength": found[1]}
    )
    formats = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email", "unknown"])
    return st.one_of(
        st.just({"type": "string"}),
        lengths.map(lambda found: {"type": "string", **found}),
        PATTERNS.map(lambda text: {"type": "string", "pattern": text}),
        formats.map(lambda name: {"type": "string", "format": name}),
    )


ATOMS = st.sampled_from(
    r"a . \w \d \0 \1 \a \c \e \k \z \A \Z \b \/ \- \< \cA \x41 \x4 \u0041 \uDa3d \u{41} \u{ \p{L} "
    r"\pL \p{ \ü ü [^] [] []a] [^]a] [[a] [^[\]] [a-] [\w.-] [\0] [\b] [\cA] [[:alpha:]] [!&&a] "
    r"{ } ] {,3} ^a b$ a|^b a$|b (?i) (?m) (?=a) (?<=a) (?#a) (?>a) (?m:^) (?P=n) (?<$>a)".split()
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, min_size=1, max_size=3).flatmap(
        lambda parts: st.sampled_from(["{}", "{}$", "^{}", "({})", "(?:{})*", "(?i:{}){{2}}"]).map(
            lambda form: form.format("".join(parts))
        )
    ),
    max_leaves=6,
)


def compound(inner: Any) -> Any:
    objects = st.builds(
        lambda members, required, more: {
            "type": "object",
            "properties": members,
            "required": [name for name in members if name in required],
            **more,
        },
        st.dictionaries(NAMES, inner, max_size=3),
        st.sets(NAMES),
        st.just({}) | inner.map(lambda schema: {"additionalProperties": schema}),
    )
    arrays = st.builds(
        lambda item, low, more: {
            "type": "array",
            "items": item,
            "minItems": low,
            "maxItems": low + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    tuples = st.lists(inner, min_size=1, max_size=3)
    unions = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        objects,
        arrays,
        tuples.map(lambda parts: {"type": "array", "prefixItems": parts}),
        unions.map(lambda parts: {"anyOf": parts}),
        unions.map(lambda parts: {"oneOf": parts}),
        unions.map(lambda parts: {"allOf": parts}),
        st.tuples(unions, inner).map(lambda found: {"anyOf": found[0], "allOf": [found[1]]}),
        inner.map(
            lambda schema: (
                {"type": "object", "additionalProperties": schema}
                | {"propertyNames": {"enum": ["a", "b."]}}
            )
        ),
        inner.map(lambda schema: schema | {"title": "T", "x-order": 3, "default": None}),
        inner.map(lambda schema: schema | {"uniqueItems": True, "not": {"const": 5}}),
    )


SCHEMAS = st.recursive(
    st.one_of(
        st.just({}),
        st.sampled_from(["null", "boolean", "string", "number"]).map(lambda name: {"type": name}),
        numbers(),
        strings(),
        SCALARS.map(lambda value: {"const": value}),
        st.lists(SCALARS, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    ),
    compound,
    max_leaves=6,
)


def without(schema: Any, paths: tuple[str, ...], path: str = "s") -> Any:
    """Return the schema without the keywords that are not enforced."""
    if isinstance(schema, list):
        return [without(item, paths, f"{path}[{index}]") for index, item in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        here = f"{path}.{name}"
        if here not in paths:
            kept[name] = value if name in ("const", "enum") else without(value, paths, here)
        elif name == "oneOf":
            kept.setdefault("allOf", []).append({"anyOf": without(value, paths, here)})
    return kept


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["a", "#", "object", "^"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner, max_size=1),
    max_leaves=3,
)
KEYWORDS = st.sampled_from(
    "type enum const anyOf oneOf allOf not if $ref $defs properties required items prefixItems "
    "additionalProperties patternProperties minLength pattern format minimum multipleOf "
    "maxItems uniqueItems nullable propertyNames".split()
)


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A schema with an arbitrary value for some keyword."""
    schema = deepcopy(draw(SCHEMAS))
    place = schema
    while isinstance(place, dict) and place and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(place)))
        place = place[name][0] if isinstance(place[name], list) and place[name] else place[name]
    if isinstance(place, dict):
        place[draw(KEYWORDS)] = draw(ANY_VALUE)
    return schema


def check_a_schema(schema: Any, seed: int) -> None:
    """Walk through a schema's answers; each must be valid under the enforced part."""
    try:
        constrained = constrain(JsonSchema(schema, "s"))
    except InvalidRequest:
        assume(False)
    try:
        found = answer(constrained.constraint.grammar, seed, max_bytes=150)
    except InvalidRequest as error:
        assert error.details["field"] == "s"  # no value is valid, or it is too large
        return
    if found is not None:
        value = json.loads(found)
        promised = without(schema, constrained.not_enforced)
        jsonschema.validate(value, promised, cls=jsonschema.Draft202012Validator)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@example(schema={"type": "integer", "multipleOf": 7, "minimum": -0.5}, seed=1)
def test_every_forced_output_is_valid(schema: Any, seed: int) -> None:
    check_a_schema(schema, seed)


@pytest.mark.parametrize("n_cases", [150, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_damaged_schema_is_followed_or_refused_by_its_field(n_cases: int) -> None:
    @settings(max_examples=n_cases, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schema=damaged(), seed=st.integers(0, 99))
    def check(schema: Any, seed: int) -> None:
        try:
            answer(constrain(JsonSchema(schema, "s")).constraint.grammar, seed, max_bytes=60)
        except InvalidRequest as error:
            faults = error.details.get("errors", [error.details])
            assert all(fault["field"].startswith("s") for fault in faults)

    check()


# --- as clients write them -------------------------------------------------------------------


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: Annotated[str, StringConstraints(min_length=1, pattern="^[A-Z]")]


class Node(BaseModel):
    value: float = Field(gt=0, lt=1)
    next: Node | None = None


class Record(BaseModel):
    """A model with what people commonly use."""

    title: str = Field(max_length=40, description="a title")
    when: datetime
    day: date | None = None
    id: UUID
    price: Decimal = Field(ge=0)
    pair: tuple[int, str]
    tags: list[str] = Field(min_length=1, max_length=3)
    counts: dict[str, int] = {}
    pet: Cat | Dog = Field(discriminator="kind")
    tree: Node
    level: Enum("Level", {"low": "low", "high": "high"})  # type: ignore[valid-type]
    either: int | str | None = None
    anything: Any = None


RECORD = Record(
    title="Ünï",
    when=datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
    id=UUID("f81d4fae-7dec-41d0-a765-00a0c91e6bf6"),
    price=Decimal("12.50"),
    pair=(1, "a"),
    tags=["x"],
    counts={"a": 1},
    pet=Dog(name="Rex"),
    tree=Node(value=0.5, next=Node(value=0.25)),
    level="high",
    either="x",
    anything=[1, {"a": None}],
)


def pet(kind: str) -> dict[str, Any]:
    kinds = {"const": kind, "type": "string", "default": kind}
    return {"type": "object", "properties": {"kind": kinds}, "required": ["kind"]}


SHARE = {"type": "number", "minimum": 0.0, "maximum": 1.0}
OPEN_SHARE = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
ZODS_INTEGER = {"type": "integer", "minimum": -SAFE, "maximum": SAFE}
RUSTS_INTEGER = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
ZODS_EMAIL = {
    "type": "string",
    "format": "email",
    "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
}
BY_LEVEL = {  # pydantic's `dict[Level, int]`
    "$defs": {"Level": {"enum": ["low", "very high"], "title": "Level", "type": "string"}},
    "additionalProperties": {"type": "integer"},
    "propertyNames": {"$ref": "#/$defs/Level"},
    "type": "object",
}
PETS = {
    "$defs": {"cat": pet("cat"), "dog": pet("dog")},
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/cat"}},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (SHARE, 0, 1.01),
        (SHARE, 0.25, -0.1),
        (SHARE, 1.0, 2),
        (OPEN_SHARE, 0.499, 0.5),
        (OPEN_SHARE, 0.499, 0),
        (ZODS_INTEGER, SAFE, SAFE + 1),
        (RUSTS_INTEGER, SAFE, 2**63),
        ({"type": "number", "maximum": 1.7976931348623157e308}, 5.5, "5.5"),
        (ZODS_EMAIL, "ada@example.org", "a..b@example.org"),
        (PETS, {"kind": "dog"}, {"kind": "cow"}),
        ({"type": "string", "pattern": "^[A-Z]{2}$"}, "AB", "ab"),
        ({"type": "string", "pattern": "b"}, "abc", "xyz"),
        ({"type": "string", "format": "date"}, "2024-02-29", "2024-13-01"),
        ({"type": "string", "format": "uuid"}, "f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "f81d"),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}]}, [None, 1], [None]),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, [1], [1, 2]),
        ({"type": "string", "nullable": True}, None, 1),
        ({"allOf": [{"$ref": "#/definitions/n"}], "definitions": {"n": {"type": "null"}}}, None, 1),
        ({"$ref": "#/definitions/Page%3CA%3E", "definitions": {"Page<A>": {"const": 1}}}, 1, 2),
        (
            {"allOf": [{"properties": {"a": {"const": 1}}}, {"required": ["a"]}], "type": "object"},
            {"a": 1},
            {},
        ),
        ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, 4, 3),
        ({"maximum": 3, "exclusiveMaximum": True, "type": "integer"}, 2, 3),
        ({"type": ["integer", "null"], "format": "int32"}, None, "a"),
        ({"anyOf": [{"type": "null"}, {"items": {"$ref": "#/anyOf/0"}}]}, [None], [1]),
        (
            {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "oneOf": [{"type": "integer"}, {"type": "null"}],
            },
            None,
            "a",
        ),
        ({"properties": {"a": {"type": "null"}}}, {"a": None}, {"b": 1}),
        ({"properties": {}, "required": ["z"]}, {"z": [1]}, {}),
        ({"type": ["string", "null"], "maxLength": 1}, None, "ab"),
        ({"const": {"a": [1, None]}}, {"a": [1, None]}, {"a": [1]}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"x": 1}, {"x": "y"}),
        (BY_LEVEL, {"low": 1, "very high": 2}, {"mid": 1}),
        (BY_LEVEL, {"low": 1}, {"low": "x"}),
        ({"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}}, {"de": 1}, {"x": 1}),
    ],
)
def test_a_keyword_is_enforced(schema: Any, good: Any, bad: Any) -> None:
    assert holds(schema, good) and not holds(schema, bad)


@pytest.mark.parametrize("name", ZODS)
def test_zods_schemas_are_enforced_whole(name: str) -> None:
    for schema in ZODS[name]["schemas"].values():
        assert holds(schema, ZODS[name]["value"])


def test_pydantics_schemas_are_enforced_whole() -> None:
    for mode in ("validation", "serialization"):
        schema = Record.model_json_schema(mode=mode)
        assert holds(schema, json.loads(RECORD.model_dump_json()))


@pytest.mark.parametrize(
    "branches",
    [
        ({"type": "number"}, {"type": "integer"}),
        ({"enum": [1, {"b": 2, "a": 1}]}, {"const": {"a": 1, "b": 2}}),
        ({"const": {"a": [1, 2]}}, {"const": {"a": [1.0, 2]}}),
        ({"const": 0}, {"const": -0.0}),
        ({"const": 2**60}, {"enum": [2.0**60]}),
    ],
)
def test_overlapping_branches_of_one_of_are_not_enforced(branches: tuple[Any, Any]) -> None:
    assert "s.oneOf" in enforced({"oneOf": [*branches]})[1]


def test_branches_with_distinct_constants_are_enforced() -> None:
    branches = [True, 1, "1", None, [1], [True], {"a": 1}, {"a": True}, {}, []]
    branches += range(2, 80)
    assert enforced({"oneOf": [{"const": each} for each in branches]})[1] == ()


@given(text=EXPRESSIONS)
def test_an_expression_is_enforced_or_named(text: str) -> None:
    grammar, not_enforced = enforced({"type": "string", "pattern": text})
    assert answer(grammar, seed=1, max_bytes=5) != ""
    assert not_enforced in ((), ("s.pattern",))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "uniqueItems": True}, "s.uniqueItems"),
        ({"type": "array", "items": {"not": {}}}, "s.items.not"),
        ({"properties": {"a": {"if": {}}}}, "s.properties.a.if"),
        ({"type": "string", "pattern": "(?=a)b"}, "s.pattern"),
        ({"type": "string", "pattern": r"\bb"}, "s.pattern"),
        ({"type": "string", "pattern": r"(a)\1"}, "s.pattern"),
        *(
            ({"type": "string", "pattern": text}, "s.pattern")
            for text in (r"\0", "[^]", "a{,3}", "a{b}", "a^b", "(a$)?", r"\cJ", r"[[\]]", r"(?>a)")
        ),
        ({"type": "string", "format": "password"}, "s.format"),
        ({"type": "integer", "multipleOf": 999_983}, "s.multipleOf"),
        ({"type": "integer", "minimum": 2.0**60}, "s.minimum"),
        ({"properties": {"a": {"type": "null", "required": True}}}, "s.properties.a.required"),
        ({"patternProperties": {"(?=a)b": {"type": "null"}}}, "s.patternProperties.(?=a)b"),
        ({"type": "object", "propertyNames": {"enum": []}}, "s.propertyNames"),
        ({"propertyNames": {"type": "null", "const": "a"}}, "s.propertyNames"),
        ({"type": "string", "maxLength": 10**9}, "s.maxLength"),
        ({"$defs": {"x": {"not": {}}}, "items": {"$ref": "#/$defs/x"}}, "s.$defs.x.not"),
        ({"type": "integer", "const": -(2**63)}, "s.const"),
        ({"type": "integer", "const": SAFE + 2}, "s.const"),
        ({"enum": [0, {"a": [1e300]}]}, "s.enum"),
        ({"allOf": [{"type": "integer"}, {"const": -1e300}]}, "s.allOf[1].const"),
    ],
)
def test_what_is_not_enforced_is_named_and_strict_refuses_it(schema: Any, path: str) -> None:
    grammar, not_enforced = enforced(schema)
    assert not_enforced == (path,)
    assert answer(grammar, seed=1, max_bytes=50) != ""
    for form, strict, remedy in (
        (JsonSchema(schema, "s"), True, "leave it out"),  # the worker is strict
        (JsonSchema(schema, "s", strict=True), False, "leave it out, or ask without strict"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            constrain(form, strict=strict)
        [fault] = refused.value.details["errors"]
        assert fault["field"] == path and fault["message"].endswith(f"enforced; {remedy}")
