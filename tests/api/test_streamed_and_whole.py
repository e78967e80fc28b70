"""A stream says what the whole answer says, and both say what the deltas were: drawn answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.dialect import Answer
from worker.api.chat.message import Choice
from worker.api.chat.request import Generate
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.api.dialects.anthropic.stream import MessageAnswer
from worker.api.dialects.ollama.schema import ChatBody
from worker.api.dialects.ollama.stream import ChatAnswer
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.dialects.responses.stream import ResponseAnswer
from worker.api.http.state import AppState
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.job import Job
from worker.supervisor.supervisor import Supervisor
from worker.wire.messages import Finished, Started
from worker.wire.work import InferenceRequest, Sampling

Part = tuple[str, str, str]
"""Its kind, its text or arguments, and the name of the function called."""

PIECES = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.none() | st.booleans() | st.integers() | st.text(max_size=8), max_size=3
)


def _cut(text: str, sizes: Sequence[int]) -> list[str]:
    """The text in pieces of these sizes, over and over."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[at : at + size])
        at += size
    return pieces


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Delta], list[Part]]:
    """The deltas of an answer, and its parts."""
    deltas: list[Delta] = []
    parts: list[Part] = []
    n_calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind == "call":
            arguments = json.dumps(draw(ARGUMENTS))
            sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
            deltas.append(Call(n_calls, f"call_{n_calls}", "look"))
            deltas += [Arguments(n_calls, piece) for piece in _cut(arguments, sizes)]
            parts.append((kind, arguments, "look"))
            n_calls += 1
        else:
            pieces = draw(PIECES)
            made = Text if kind == "text" else Reasoning
            deltas += [made(piece) for piece in pieces]
            parts.append((kind, "".join(pieces), ""))
    joined: list[Part] = []
    for part in parts:
        if joined and part[0] != "call" and joined[-1][0] == part[0]:
            joined[-1] = (part[0], joined[-1][1] + part[1], "")
        else:
            joined.append(part)
    return deltas, joined


def answered(make: Any, body: Any, deltas: Iterable[Delta]) -> tuple[bytes, Any]:
    """What the stream of these deltas is, and the whole answer."""
    state = AppState(
        Settings(), cast(Supervisor, None), Metrics("w"), "w", "tiny", "i", lambda: None
    )
    work = InferenceRequest("a", "a", Sampling(seed=1), max_tokens=9)
    choice = Choice(0, Job(1, work, Metrics("w"), lambda job, error: None))
    answer: Answer[Any] = make(body, Generate("a", (), work.sampling), [choice], state)
    stream = b""
    for delta in (Started(0, 0), *deltas, Finished(0, "EOS", 3, 1.0)):
        choice.add(delta)
        stream += answer.encode(choice, delta)
    return stream + answer.ending(), answer.whole()


def events_of(stream: bytes) -> list[Any]:
    events = stream.decode().split("\n\n")[:-1]
    return [json.loads(event.partition("\ndata: ")[2]) for event in events]


@settings(max_examples=500, deadline=None)
@given(answers())
def test_anthropics_messages(drawn: tuple[list[Delta], list[Part]]) -> None:
    deltas, parts = drawn
    body = MessagesBody.model_validate(
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    )
    stream, whole = answered(MessageAnswer, body, deltas)
    kinds = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
    texts = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    blocks: list[dict[str, Any]] = []
    open_at = None
    for event in events_of(stream):
        match event["type"]:
            case "content_block_start":
                assert open_at is None and event["index"] == len(blocks)
                open_at = event["index"]
                blocks.append({"block": event["content_block"], "text": ""})
            case "content_block_delta":
                assert event["index"] == open_at
                blocks[-1]["text"] += event["delta"][texts[event["delta"]["type"]]]
            case "content_block_stop":
                assert event["index"] == open_at
                open_at = None
    streamed = [(each["block"]["type"], each["text"]) for each in blocks]
    assert streamed == [(kinds[kind], text) for kind, text, _ in parts]
    for (kind, text, name), content in zip(parts, whole["content"], strict=True):
        assert content["type"] == kinds[kind]
        if kind == "call":
            assert content["input"] == json.loads(text) and content["name"] == name
        else:
            assert content[kinds[kind]] == text
    last = next(event for event in events_of(stream) if event["type"] == "message_delta")
    assert last["delta"]["stop_reason"] == whole["stop_reason"]
    assert last["usage"] == whole["usage"]


@settings(max_examples=500, deadline=None)
@given(answers())
def test_openais_responses(drawn: tuple[list[Delta], list[Part]]) -> None:
    deltas, parts = drawn
    body = ResponsesBody.model_validate({"input": "a"})
    stream, whole = answered(ResponseAnswer, body, deltas)
    events = events_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == whole["output"] and added == [item["id"] for item in done]
    grown = [(e["output_index"], e["delta"]) for e in events if e["type"].endswith((".delta",))]
    texts = {at: "".join(text for _, text in each)
             for at, each in groupby(grown, key=lambda pair: pair[0])}  # fmt: skip
    assert list(texts.values()) == [text for _, text, _ in parts]
    for (kind, text, name), item in zip(parts, whole["output"], strict=True):
        if kind == "call":
            assert (item["type"], item["arguments"], item["name"]) == ("function_call", text, name)
        else:
            assert "".join(part["text"] for part in item["content"]) == text


@settings(max_examples=500, deadline=None)
@given(answers())
def test_ollamas_chats(drawn: tuple[list[Delta], list[Part]]) -> None:
    deltas, parts = drawn
    stream, whole = answered(ChatAnswer, ChatBody.model_validate({"model": "m"}), deltas)
    lines = [json.loads(line) for line in stream.decode().split("\n")[:-1]]
    messages = [line["message"] for line in lines]

    def of(kind: str) -> list[str]:
        return [text for each, text, _ in parts if each == kind]

    for name, kind in (("content", "text"), ("thinking", "reasoning")):
        streamed = "".join(message.get(name, "") for message in messages)
        assert streamed == "".join(of(kind)) == whole["message"].get(name, "")
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert calls == whole["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == [*map(json.loads, of("call"))]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    different = {"created_at", "total_duration", "message"}
    assert {k: v for k, v in lines[-1].items() if k not in different} == {
        k: v for k, v in whole.items() if k not in different
    }
