"""The last event of a stream whose worker is lost, in each dialect's form."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support import clock
from tests.unit.fleet.scripted import SSE_HEAD, Conversation, call, fleet_of
from worker.api.app import DIALECTS
from worker.api.http.encoding import KEEPALIVE, LINE_KEEPALIVE
from worker.api.http.operation import NDJSON, SSE, StreamForm
from worker.api.http.routes import Routes
from worker.errors import (
    ContextLengthExceeded,
    EngineCrashed,
    InvalidRequest,
    ShuttingDown,
    WorkerError,
)
from worker.fleet import relay
from worker.fleet.endings import Tail

pytestmark = pytest.mark.anyio

ROUTES = Routes(DIALECTS)
STREAMED = {"stream": True}
NATIVE = b'event: token\ndata: {"type":"token","t":"a","i":0}\n\n'
CHAT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
ANTHROPIC = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp-1",'
    b'"object":"response","created_at":1,"status":"in_progress","output":[]},'
    b'"sequence_number":0}\n\n'
    b'event: response.output_text.delta\ndata: {"delta":"a","sequence_number":7}\n\n'
)


def forms_at(path: str) -> Mapping[str, StreamForm]:
    return ROUTES.at(path).operations["POST"].streams


def test_each_operation_that_streams_defines_the_end_of_its_streams() -> None:
    """Otherwise a gateway could only buffer a stream, and would cut it if its worker is lost."""
    for dialect in DIALECTS:
        for operation in dialect.operations:
            assert operation.answers.keys() & {SSE, NDJSON} == operation.streams.keys(), operation


@pytest.mark.parametrize("path", ["/v1/stream", "/execute/j"])
async def test_a_kept_stream_of_lines_is_not_buffered(path: str) -> None:
    line = b'{"done":false}\n'

    async def makes_lines(conversation: Conversation) -> None:
        conversation.writer.write(SSE_HEAD.replace(b"text/event-stream", NDJSON.encode()))
        await conversation.chunk(line)
        await came.wait()

    came = asyncio.Event()
    async with fleet_of(makes_lines) as (gateway, _, _), asyncio.timeout(10):
        got = await call(gateway, path, leave_after_chunks=1)
        came.set()
    assert got.body == line


def last_event(body: bytes) -> tuple[str, dict[str, Any]]:
    """Return the last event's name, which may be empty, and its data."""
    head, _, data = body.decode().rpartition("\n\n")[0].rpartition("data: ")
    return head.rpartition("event: ")[2].rstrip("\n"), json.loads(data)


async def lost_after(sent: bytes, path: str) -> bytes:
    """Return what a client gets if its worker sends this and half an event, and then is gone."""

    async def script(conversation: Conversation) -> None:
        await conversation.stream(sent, b"data: {half an ev")

    async with fleet_of(script) as (gateway, _, _):
        got = await call(gateway, path, STREAMED)
    assert got.status == 200 and got.ended
    assert got.body.startswith(sent)
    return got.body.removeprefix(sent)


@pytest.mark.parametrize(
    ("path", "sent", "name", "error"),
    [
        ("/execute", NATIVE, "error", {"code": "ENGINE_CRASHED", "retriable": True}),
        ("/v1/chat/completions", CHAT, "", {"type": "server_error", "code": "engine_crashed"}),
        ("/v1/messages", ANTHROPIC, "error", {"type": "api_error"}),
    ],
)
async def test_an_error_has_the_dialects_form(
    path: str, sent: bytes, name: str, error: dict[str, object]
) -> None:
    kind, event = last_event(await lost_after(sent, path))
    assert kind == name == event.get("type", "")
    assert error.items() <= event.get("error", event).items()


@pytest.mark.parametrize(
    "sent",
    [
        RESPONSES,
        RESPONSES + KEEPALIVE,
        KEEPALIVE * 2 + RESPONSES + KEEPALIVE * 2,
        RESPONSES.replace(b"\n\n", b"\nid: 3\n\n"),
        RESPONSES.replace(b'"delta":"a"', b'"delta":"data: a"'),
    ],
    ids=["alone", "silence", "long silence", "kept", "text like SSE"],
)
async def test_responses_fail_with_the_response_that_has_begun(sent: bytes) -> None:
    name, event = last_event(await lost_after(sent, "/v1/responses"))
    assert name == event["type"] == "response.failed"
    assert event["sequence_number"] == 8
    response = event["response"]
    assert (response["id"], response["status"]) == ("resp-1", "failed")
    assert response["error"]["code"] == "server_error"
    tail = Tail(forms_at("/v1/responses")[SSE], SSE)
    assert b"".join(tail.whole(bytes([byte])) for byte in sent) == sent
    assert last_event(tail.ending(EngineCrashed("lost")))[1]["response"]["id"] == "resp-1"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/execute", EngineCrashed("The engine died.")),
        ("/execute", ShuttingDown("The worker drains.")),
        ("/v1/chat/completions", EngineCrashed("The engine died.")),
        ("/v1/chat/completions", ContextLengthExceeded("x", prompt_tokens=9, context_length=8)),
        ("/v1/messages", InvalidRequest("x is no field")),
    ],
)
async def test_an_error_after_a_comment_is_the_workers(
    path: str, error: WorkerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status has already been sent, but not its code and message."""
    monkeypatch.setattr(relay, "KEEPALIVE_SECONDS", 0.05)
    monkeypatch.setattr(relay, "REPLACEMENT_SECONDS", 0.2)
    dialect = ROUTES.at(path).dialect

    async def fails_late(conversation: Conversation) -> None:
        await asyncio.sleep(0.3)
        await conversation.json(error.status, dialect.errors.body(error, "id"))

    async with fleet_of(fails_late) as (gateway, _, _):
        got = await call(gateway, path, STREAMED)
    assert got.body.replace(KEEPALIVE, b"") == forms_at(path)[SSE].failure(error, b"", b"")


def test_lines_of_json() -> None:
    tail = Tail(forms_at("/v1/inference")[NDJSON], NDJSON)
    assert tail.whole(b'{"type":"token"}\n{"ty') == b'{"type":"token"}\n'
    ending = tail.ending(EngineCrashed("lost"))
    assert ending.endswith(b"}\n") and json.loads(ending)["code"] == "ENGINE_CRASHED"


@pytest.mark.parametrize(
    ("path", "media_type", "end"),
    [("/execute", SSE, b"\n\n"), ("/v1/inference", NDJSON, b"\n")],
)
def test_an_event_of_many_pieces_is_searched_once(path: str, media_type: str, end: bytes) -> None:
    tail = Tail(forms_at(path)[media_type], media_type)
    event = b"data: " + b"a" * 16 * 2**20 + end
    began = time.process_time()
    pieces = [tail.whole(event[at : at + 8192]) for at in range(0, len(event), 8192)]
    assert clock.within(time.process_time() - began, 0.5)
    assert b"".join(pieces) == event and not any(pieces[:-1])


def test_ollamas_lines() -> None:
    tail = Tail(forms_at("/api/chat")[NDJSON], NDJSON)
    line = (
        b'{"model":"a","message":{"content":"a \\"done\\":true","tool_calls":'
        b'[{"function":{"name":"end","arguments":{"done":true}}}]},"done":false}\n'
    )
    assert tail.whole(line + b'{"mod') == line and not tail.has_ended
    assert tail.ending(EngineCrashed("lost")) == b'{"error":"lost"}\n'
    assert tail.whole(b'el":"a","done":true,"done_reason":"stop"}\n') and tail.has_ended


def test_a_pull_ends_with_its_success() -> None:
    tail = Tail(forms_at("/api/pull")[NDJSON], NDJSON)
    assert tail.whole(b'{"status":"success"}\n') and tail.has_ended


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/execute", b'event: end\ndata: {"type":"end"}\n\n'),
        ("/execute", b'event: error\ndata: {"type":"error"}\n\n'),
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/chat/completions", b'data: {"error":{"message":"x"}}\n\n'),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
        ("/v1/responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ],
)
async def test_a_stream_that_has_ended_gets_no_second_end(path: str, last: bytes) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.stream(NATIVE, last)  # without the end of the body

    async with fleet_of(script) as (gateway, _, _):
        got = await call(gateway, path, STREAMED)
    assert got.ended and got.body == NATIVE + last


async def test_events_that_are_split_anywhere_are_forwarded_whole() -> None:
    stream = RESPONSES + b'event: response.completed\ndata: {"type":"response.completed"}\n\n'

    async def script(conversation: Conversation) -> None:
        await conversation.stream(*(stream[n : n + 1] for n in range(len(stream))))
        await conversation.end()

    async with fleet_of(script) as (gateway, _, _):
        got = await call(gateway, "/v1/responses", STREAMED)
    assert got.body == stream
    assert all(chunk.endswith(b"\n\n") for chunk in got.chunks)


@pytest.mark.parametrize(
    ("path", "end"),
    [("/api/chat", b'{"model":"m","done":true}'), ("/v1/inference", b'{"type":"end"}')],
)
def test_spaces_between_lines_pass_at_once(path: str, end: bytes) -> None:
    tail = Tail(forms_at(path)[NDJSON], NDJSON)
    assert tail.whole(LINE_KEEPALIVE) == LINE_KEEPALIVE
    assert tail.whole(b'{"type":"token","t":') == b""
    assert tail.whole(b'" "}\n ') == b'{"type":"token","t":" "}\n'
    assert tail.whole(LINE_KEEPALIVE + end) == b"" and not tail.has_ended
    assert tail.whole(b"\n") == b"  " + end + b"\n" and tail.has_ended
