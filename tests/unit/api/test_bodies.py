"""Reading of bodies: what they may contain, and the cost of faults."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message

from tests.support import clock
from tests.support.scripted_api import ScriptedWorker
from worker.api.app import DIALECTS
from worker.api.dialects.openai.schema import ChatBody
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.http import body, encoding
from worker.api.http.body import MAX_NESTING, is_deep, parse_json, received
from worker.api.http.faults import faults_of
from worker.errors import InvalidRequest
from worker.observability.logs import digest
from worker.settings import Settings
from worker.wire.work import ChatPrompt, Prompt

TEXT = st.text(st.sampled_from('a",:{}[]\\\n😀'), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def walked(value: Any) -> Iterator[Any]:
    yield value
    for child in value.values() if isinstance(value, dict) else value:
        yield from walked(child) if isinstance(child, dict | list) else [child]


def n_signs(value: Any) -> dict[str, int]:
    """Count each limited kind in a JSON value."""
    found = [each for each in walked([value]) if isinstance(each, dict | list)][1:]
    objects = [each for each in found if isinstance(each, dict)]
    return {
        "values": sum(max(len(each) - 1, 0) for each in found),
        "names": sum(map(len, objects)),
        "objects": len(objects),
        "lists": len(found) - len(objects),
    }


@given(value=JSON, limit=st.integers(0, 3), slice_bytes=st.integers(2, 9), ascii=st.booleans())
def test_limits_of_json_count_outside_of_strings(
    value: Any, limit: int, slice_bytes: int, ascii: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        signs = {kind: (limit, sign) for kind, (_, sign) in body.MAX_SIGNS.items()}
        patch.setattr(body, "MAX_SIGNS", signs)
        patch.setattr(body, "_ALWAYS_FEW", 0)
        patch.setattr(body, "_SLICE_BYTES", slice_bytes)
        counts = n_signs(value)
        excess = {kind for kind, (most, _) in signs.items() if counts[kind] > most}
        if excess:
            with pytest.raises(InvalidRequest) as refused:
                parse_json(text, "x")
            (fault,) = refused.value.details["errors"]
            assert fault["field"] == "x" and fault["constraint"] == "maxItems"
            assert fault["message"].split()[5].rstrip(";") in excess
        else:
            assert parse_json(text) == value


CUT_OFF = st.builds(
    lambda parts, kept: "".join(parts)[: kept or None],
    st.lists(TEXT.map(json.dumps) | st.sampled_from(list("12,: -.e[]{}")), max_size=40),
    st.integers(0, 80),
)
"""The beginning of something that may be JSON, with valid strings."""


def without_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*(?:"|\\?$)', '"', text, flags=re.DOTALL)


@given(text=CUT_OFF, slice_bytes=st.integers(2, 9))
def test_strings_are_left_out_wherever_a_slice_ends(text: str, slice_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_SLICE_BYTES", slice_bytes)
        outside = body._outside_of_strings(text.encode()).decode()
    assert outside.replace('"', "") == without_strings(text).replace('"', "")


WIDE = "9" * 65


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a":{WIDE}}}',
        f'{{"a":"{WIDE}","b":[-{WIDE}]}}',
        f'["\\"",{WIDE}]',
        WIDE,
        f'{{"a":"{"x" * 65_440}","b":[{",".join(["9" * 4299] * 940)}]}}',
        "[" + " " * 65_500 + "9" * 4000 + "]",
    ],
)
def test_a_number_of_many_digits_is_refused(text: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest) as refused:
        parse_json(text.encode(), "x")
    assert clock.within(time.thread_time() - began, 0.05)
    (fault,) = refused.value.details["errors"]
    assert fault["field"] == "x" and fault["constraint"] == "maxDigits"


@pytest.mark.parametrize(
    "text",
    [
        "9" * 64,
        f'{{"a":"{WIDE}"}}',
        f'["\\"{WIDE}",1]',
        f"[0.{WIDE},1e-{'0' * 65}1,1E+{'0' * 65}1]",
        f'[1,"{WIDE}"]',
    ],
)
def test_many_digits_elsewhere_are_accepted(text: str) -> None:
    assert parse_json(text.encode()) == json.loads(text)


def test_escapes_are_bounded() -> None:
    def text(n: int) -> bytes:
        return b'{"a":"' + b"\\n" * n + b'"}'

    assert parse_json(text(body.MAX_ESCAPES)) == {"a": "\n" * body.MAX_ESCAPES}
    with pytest.raises(InvalidRequest, match="1048576 escapes"):
        parse_json(text(body.MAX_ESCAPES + 1))


@given(text=CUT_OFF, slice_bytes=st.integers(2, 9))
def test_a_wide_number_is_found_wherever_a_slice_ends(text: str, slice_bytes: int) -> None:
    wide = r"(?<![0-9.eE+])(?<![eE]-)[0-9]{3}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_SLICE_BYTES", slice_bytes)
        patch.setattr(body, "MAX_DIGITS", 2)
        patch.setattr(body, "_WIDE_NUMBER", re.compile(wide.encode()))
        found = body._has_wide_number(text.encode())
    assert found == (re.search(wide, without_strings(text)) is not None)


@given(value=JSON, at_once=st.integers(1, 3))
def test_json_encoded_in_parts_equals_the_whole(value: Any, at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "_VALUES_AT_ONCE", at_once)
        assert b"".join(encoding.in_parts(value)) == encoding.dumps(value).encode()
        listed = b"".join(encoding.in_parts([{"a": iter([value, value])}]))
        assert listed == encoding.dumps([{"a": iter([value, value])}]).encode()
        assert listed == encoding.dumps([{"a": [value, value]}]).encode()
        vector = array("f", range(at_once * 2))
        assert (
            b"".join(encoding.in_parts([vector, vector[:0]]))
            == encoding.dumps([vector.tolist(), []]).encode()
        )


@given(text=st.text(st.sampled_from('a\n"\x85\u2028\u2029é')))
def test_a_line_break_within_json_ends_no_line(text: str) -> None:
    for written in (encoding.dumps([text]), f"[{encoding.quoted(text)}]"):
        assert len(written.splitlines()) == 1 and json.loads(written) == [text]


def test_iterators_are_encoded_lazily() -> None:
    numbers = iter(range(3 * encoding._VALUES_AT_ONCE))
    parts = encoding.in_parts([{"content": numbers}])
    assert next(part for part in parts if b"1" in part).startswith(b"[0,1,2")
    assert len(list(numbers)) > encoding._VALUES_AT_ONCE


@pytest.mark.parametrize("n_values", [0, 4095, 4096, 100_000])
def test_json_of_many_values_is_encoded_off_the_event_loop(n_values: int) -> None:
    threads: set[int] = set()
    sent: list[Message] = []

    def each() -> Iterator[int]:
        for number in range(n_values):
            threads.add(threading.get_ident())
            yield number

    async def send(message: Message) -> None:
        sent.append(message)

    async def answered() -> None:
        answer = await encoding.json_answer(encoding.in_parts(each()), n_values)
        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, AsyncMock(), send)

    asyncio.run(answered())
    made = b"".join(message.get("body", b"") for message in sent)
    assert json.loads(made) == list(range(n_values))
    length, kind = (dict(sent[0]["headers"])[name] for name in (b"content-length", b"content-type"))
    assert (int(length), kind) == (len(made), b"application/json")
    assert (threading.get_ident() in threads) == (0 < n_values < 4096)


@pytest.mark.parametrize("levels", [0, 1, MAX_NESTING, MAX_NESTING + 1, 150])
def test_levels_are_counted(levels: int) -> None:
    value: Any = 1
    for level in range(levels):
        value = {"a": value} if level % 2 else [value, 2]
    assert is_deep(value) == (levels > MAX_NESTING)


def bodies() -> dict[str, type[BaseModel]]:
    state = ScriptedWorker(Settings(), None).state
    found = {
        operation.path: operation.body_of(state)
        for dialect in DIALECTS
        for operation in dialect.operations
    }
    return {path: model for path, model in found.items() if model is not None}


def collections(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a model's core schema that accept lists or mappings."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set", "frozenset", "dict"):
            yield schema
        for name, part in schema.items():
            if name != "json_schema_input_schema":  # a description, which accepts nothing
                yield from collections(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from collections(part)


@pytest.mark.parametrize("path", bodies())
def test_lists_of_a_body_fail_fast(path: str) -> None:
    """Otherwise a list of 200,000 wrong items becomes as many errors in one native call.
    `max_length` does not prevent this, because pydantic counts only valid items."""
    model = bodies()[path]
    model.model_rebuild()
    for found in collections(model.__pydantic_core_schema__):
        items = [found.get("values_schema"), *found.get("items_schema", ())]
        takes_anything = all(item is None or item["type"] == "any" for item in items)
        assert found.get("fail_fast") or takes_anything, found


@pytest.mark.parametrize(
    ("fields", "constraint", "message"),
    [
        ({"metadata": dict.fromkeys("abcdefghijklmnopq", "x")}, "maxProperties",
         "metadata must be an object of at most 16 fields; it has 17 fields"),
        ({"include": ["x"] * 65}, "maxItems",
         "include must be a list of at most 64 items; it has 65 items"),
        ({"model": "x" * 1025}, "maxLength",
         "model must be a text of at most 1024 characters; it has 1025 characters"),
    ],
)  # fmt: skip
def test_too_long_values_are_named_by_their_kind(
    fields: dict[str, Any], constraint: str, message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        ResponsesBody.model_validate({"input": "a"} | fields)
    [fault] = faults_of(refused.value, ResponsesBody)
    assert (fault["constraint"], fault["message"]) == (constraint, message)


def test_a_models_schema_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n_built = 0
    build = ChatBody.model_json_schema

    def counted(**options: Any) -> dict[str, Any]:
        nonlocal n_built
        n_built += 1
        return build(**options)

    monkeypatch.setattr(ChatBody, "model_json_schema", counted)
    for wrong in (1, "x", None):
        with pytest.raises(ValidationError) as refused:
            ChatBody.model_validate({"messages": wrong, "n": "one"})
        assert {fault["field"] for fault in faults_of(refused.value, ChatBody)} == {"messages", "n"}
    assert n_built <= 1


MEGABYTES = 4_000_000
LARGE_PROMPTS: dict[str, Prompt] = {
    "letters": ChatPrompt(({"role": "user", "content": "a" * MEGABYTES},)),
    "umlauts": ChatPrompt(({"role": "user", "content": "ü" * (MEGABYTES // 2)},)),
    "messages": ChatPrompt(({"role": "user", "content": "a" * 900},) * 4096),
    "ids": tuple(range(MEGABYTES // 16)),
    "text": "fox " * (MEGABYTES // 4),
}


@pytest.mark.parametrize("name", LARGE_PROMPTS)
def test_the_digest_of_a_large_prompt_takes_milliseconds(name: str) -> None:
    names, times = set(), []
    for _ in range(3):
        began = time.thread_time()
        names.add(digest(LARGE_PROMPTS[name]))
        times.append(time.thread_time() - began)
    assert len(names) == 1 and names.isdisjoint(
        digest(prompt) for other, prompt in LARGE_PROMPTS.items() if other != name
    )
    assert clock.within(min(times), 0.02)


@pytest.mark.anyio
async def test_a_body_in_tiny_pieces_takes_no_more_memory_than_its_bytes() -> None:
    pieces = iter([b"  "] * 100_000)

    async def receive() -> dict[str, Any]:
        piece = next(pieces, b"")
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    reading = SimpleNamespace(body_bytes=0)
    request = Request({"type": "http", "headers": [], "app": reading}, receive)
    async with received(request, 2**22) as found:
        assert len(found) == 200_000 and sys.getsizeof(found) < 250_000
        assert reading.body_bytes == 200_000
    assert reading.body_bytes == 0
