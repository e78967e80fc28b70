"""Schemas as grammars: what they let through, and what is refused because they could not."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.worker import WorkerProcess
from worker.api.openai.json_grammar import compile_schema
from worker.api.openai.number_grammar import integer_between, number_between

BOUND = st.none() | st.integers(-3000, 3000)


def as_regex(grammar: str) -> re.Pattern[str]:
    """A grammar without rule names is a regular expression in another spelling."""
    return re.compile(grammar.replace('"."', r"\.").replace('"', "").replace(" ", ""))


@settings(max_examples=60, deadline=None)
@given(low=BOUND, high=BOUND)
def test_exactly_the_integers_in_range_match(low: int | None, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    pattern = as_regex(integer_between(low, high))
    for value in [*range(-3300, 3300), -(10**12), 10**12]:
        inside = (low is None or value >= low) and (high is None or value <= high)
        assert bool(pattern.fullmatch(str(value))) is inside, (low, high, value)
    assert not any(pattern.fullmatch(text) for text in ("", "-", "-0", "00", "01", "+1"))


@settings(max_examples=60, deadline=None)
@given(low=BOUND, high=BOUND, value=st.decimals(-3300, 3300, places=3))
def test_exactly_the_numbers_in_range_match(low: int | None, high: int | None, value: Any) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    text = f"{value:.3f}"
    if text.startswith("-0.000"):
        return
    inside = (low is None or value >= low) and (high is None or value <= high)
    assert bool(as_regex(number_between(low, high)).fullmatch(text)) is inside, (low, high, text)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "integer", "multipleOf": 2}, "s.multipleOf"),
        ({"type": "number", "minimum": 0.5}, "s.minimum"),
        ({"type": "string", "pattern": "a"}, "s.pattern"),
        ({"type": "string", "format": "email"}, "s.format"),
        ({"type": "string", "maxLength": 10**6}, "s.maxLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "s"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "s"),
        ({"type": "array", "uniqueItems": True}, "s.uniqueItems"),
        ({"type": "array", "items": {"not": {}}}, "s.items.not"),
        ({"type": "object", "minProperties": 1}, "s.minProperties"),
        ({"properties": {"a": {"if": {}}}}, "s.properties.a.if"),
        ({"anyOf": [{"type": "null"}], "type": "string"}, "s.type"),
        ({"allOf": [{"type": "null"}, {"type": "string"}]}, "s.allOf"),
        ({"$ref": "#/$defs/no"}, "s.$ref"),
        ({"$ref": "https://example.org/schema"}, "s.$ref"),
        ({"type": "text"}, "s.type"),
        ({"enum": []}, "s.enum"),
        ({"properties": {"a": 5}}, "s.properties.a"),
        (False, "s"),
        ([], "s"),
    ],
)
def test_what_cannot_be_kept_is_named(schema: Any, where: str) -> None:
    _, faults = compile_schema(schema, "s")
    assert where in [fault["field"] for fault in faults], faults


def test_all_faults_are_found_at_once() -> None:
    schema = {"properties": {"a": {"not": {}}, "b": {"type": "string", "pattern": "x"}}}
    assert len(compile_schema(schema, "s")[1]) == 2


def test_a_schema_without_end_is_refused() -> None:
    wide = {"properties": {f"p{i}": {"type": "string", "maxLength": 9} for i in range(3000)}}
    assert any("too large" in fault["message"] for fault in compile_schema(wide, "s")[1])


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "born": {"type": "string", "format": "date"},
        "mood": {"enum": ["glad", "sad", None, 7]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "pair": {"type": "array", "prefixItems": [{"type": "null"}, {"const": 'ü"\\'}]},
        "nick": {"type": ["string", "null"], "maxLength": 4},
    },
    "required": ["age", "share", "born", "mood", "tags", "pair", "nick"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["next"],
        }
    },
    "$ref": "#/$defs/node",
}
COUNTS = {"type": "object", "additionalProperties": {"type": "integer", "exclusiveMinimum": 9}}


@pytest.mark.parametrize("schema", [PERSON, TREE, COUNTS], ids=["person", "tree", "counts"])
def test_answers_follow_their_schema(worker: WorkerProcess, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    # The model knows nothing of these schemas; it is nudged towards what closes things.
    closing = [worker.post("/tokenize", {"content": c}).json()["tokens"] for c in '"}]n']
    body = {
        "messages": [{"role": "user", "content": "Count to 9."}],
        "response_format": form,
        "seed": 1,
        "n": 6,
        "max_tokens": 250,
        "temperature": 1.2,
        "logit_bias": {str(tokens[-1]): 8 for tokens in closing},
    }
    answer = worker.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    # Some run out of tokens in the middle of the object.
    ended = [c for c in answer.json()["choices"] if c["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


@pytest.mark.parametrize("seed", range(6))
def test_any_object_is_json(worker: WorkerProcess, seed: int) -> None:
    body = {
        "messages": [{"role": "user", "content": "Give me the capital of Brazil as JSON."}],
        "response_format": {"type": "json_object"},
        "seed": seed,
        "max_tokens": 200,
        "temperature": 1.2,
    }
    choice = worker.post("/v1/chat/completions", body).json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")
