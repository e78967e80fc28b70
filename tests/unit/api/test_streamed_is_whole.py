"""A stream, assembled like in its clients, equals the whole answer, in every dialect.

The events are generated: outputs with reasoning, text and calls in random cuts, several choices in
random order, log-probabilities, and ends of every kind. Nothing here needs an engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from inspect import isabstract
from typing import Any, get_args

import pydantic_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from openai.types.responses import ResponseError

from tests.support.scripted_api import ScriptedWorker, of
from tests.support.sse import parse as parse_sse
from worker.api.chat.answer import Answer
from worker.api.chat.choice import Choice
from worker.api.chat.inference import inference_of
from worker.api.chat.request import Generate
from worker.api.chat.run import _streamed
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.api.dialects.anthropic.schema import read as read_messages
from worker.api.dialects.anthropic.stream import MessageAnswer
from worker.api.dialects.llama_server.completion import TextAnswer, read_completion
from worker.api.dialects.llama_server.schema import CompletionBody as LlamaServerBody
from worker.api.dialects.native.schema import InferenceBody, read_inference
from worker.api.dialects.native.stream import NativeAnswer, NativeLines
from worker.api.dialects.ollama.schema import ChatBody as OllamaChatBody
from worker.api.dialects.ollama.schema import GenerateBody as OllamaGenerateBody
from worker.api.dialects.ollama.schema import read_chat as read_ollama_chat
from worker.api.dialects.ollama.schema import read_generate as read_ollama_text
from worker.api.dialects.ollama.stream import ChatAnswer as OllamaChatAnswer
from worker.api.dialects.ollama.stream import GenerateAnswer as OllamaTextAnswer
from worker.api.dialects.openai.schema import ChatBody, CompletionBody, read_chat
from worker.api.dialects.openai.schema import read_completion as read_openai_completion
from worker.api.dialects.openai.stream import ChatAnswer, CompletionAnswer
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.dialects.responses.schema import read as read_response
from worker.api.dialects.responses.stream import ResponseAnswer
from worker.api.http.encoding import KEEPALIVE, in_parts
from worker.api.http.operation import NDJSON
from worker.errors import EngineCrashed, WorkerError
from worker.fleet.endings import Tail
from worker.settings import Settings
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import (
    Accepted,
    Failed,
    Finished,
    PromptScored,
    Started,
    StopReason,
    Token,
    TokenLogprob,
)

STATE = ScriptedWorker(Settings(), None).state
USER = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_time", "parameters": SCHEMA}
CHOICES = {"n": 2}
Frame = tuple[int, list[StreamEvent]]
"""The choice, and its events."""


def data_of(stream: bytes) -> list[Any]:
    """Return the data of events without a name."""
    lines = stream.decode().replace(KEEPALIVE.decode(), "").split("\n\n")
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def named(stream: bytes) -> list[dict[str, Any]]:
    return [event for event in parse_sse(stream.decode().split("\n")) if event is not None]


# --- clients: assemble a stream, and the parts of the whole answer to compare -----------------


def join_chat(stream: bytes) -> Any:
    joined: dict[int, dict[str, Any]] = {}
    for chunk in data_of(stream):
        for choice in chunk["choices"]:
            found = joined.setdefault(
                choice["index"],
                {"content": "", "reasoning": "", "calls": [], "logprobs": [], "reason": None},
            )
            assert found["reason"] is None, "a delta after the end"
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(found["calls"])
                    found["calls"].append(call | {"index": 0})
                else:
                    begun = found["calls"][call["index"]]
                    (field,) = call.keys() - {"index"}
                    ((name, text),) = call[field].items()
                    begun[field][name] += text
            found["logprobs"] += (choice["logprobs"] or {}).get("content", ())
            found["reason"] = choice["finish_reason"]
    return joined


def whole_chat(answer: dict[str, Any]) -> Any:
    return {
        choice["index"]: {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"].get("reasoning_content", ""),
            "calls": [{"index": 0} | call for call in choice["message"].get("tool_calls", ())],
            "logprobs": (choice["logprobs"] or {}).get("content", []),
            "reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    }


def join_completion(stream: bytes) -> Any:
    joined: dict[int, dict[str, Any]] = {}
    for chunk in data_of(stream):
        for choice in chunk["choices"]:
            found = joined.setdefault(choice["index"], {"text": "", "logprobs": {}})
            found["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                found["logprobs"].setdefault(name, []).extend(values)
            if "prompt_logprobs" in choice:
                assert "prompt_logprobs" not in found, "the prompt is scored once"
                found["prompt_logprobs"] = choice["prompt_logprobs"]
            found["reason"] = choice["finish_reason"]
    return joined


def whole_completion(answer: dict[str, Any]) -> Any:
    names = ("text", "prompt_logprobs")
    return {
        choice["index"]: {name: choice[name] for name in names if name in choice}
        | {
            "logprobs": {n: v for n, v in (choice["logprobs"] or {}).items() if v},
            "reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    }


def join_message(stream: bytes) -> Any:
    events = named(stream)
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], dict(event["delta"])
                del delta["type"]
                [(name, text)] = delta.items()
                block[name] = block.get(name, "") + text
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for block in message["content"]:
        if "partial_json" in block:
            text = block.pop("partial_json")
            block["input"] = pydantic_core.from_json(text, allow_partial="trailing-strings")
    return message


CALL_DELTAS = ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta")


def join_response(stream: bytes) -> Any:
    """Like OpenAI's client for Node, which adds a delta only to a part that an event has begun."""
    events = named(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: list[list[Any]] = []
    parts: list[Any] = []
    for event in events:
        at: Any = event.get("output_index")
        match event["type"]:
            case "response.output_item.added":
                assert at == len(output) and not event["item"].get("content")
                output.append(["", []])
                parts.append(None)
            case "response.content_part.added":
                assert event["content_index"] == 0 and parts[at] is None
                parts[at] = event["part"]
            case "response.content_part.done":
                assert parts[at]["type"] == event["part"]["type"]
                assert event["part"]["text"] == output[at][0]
                parts[at] = event["part"]
            case "response.output_item.done":
                assert event["item"].get("content", [None]) == [parts[at]]
            case "response.custom_tool_call_input.done":
                assert event["input"] == output[at][0]
            case "response.output_text.done":
                assert [event["text"], event["logprobs"]] == output[at]
            case str(kind) if kind.endswith(".delta"):
                assert (parts[at] is None) == (kind in CALL_DELTAS)
                output[at][0] += event["delta"]
                output[at][1] += event.get("logprobs", ())
    return output, events[-1]["response"] | {"completed_at": None}


def whole_response(answer: dict[str, Any]) -> Any:
    texts = []
    for item in answer["output"]:
        content = item.get("content") or [{"text": item.get("arguments", item.get("input"))}]
        texts.append([content[0]["text"], content[0].get("logprobs", [])])
    return texts, answer | {"completed_at": None}


def join_llama_server(stream: bytes) -> Any:
    joined: dict[int, Any] = {}
    for part in data_of(stream):
        found = joined.setdefault(part["index"], ["", [], [], None])
        found[0] += part["content"]
        found[1] += part["tokens"]
        found[2] += part.get("completion_probabilities", ())
        found[3] = part.get("stop_type")
    return joined


def whole_llama_server(answer: Any) -> Any:
    answers = answer if isinstance(answer, list) else [answer]
    return {
        each["index"]: [
            each["content"],
            each["tokens"],
            each.get("completion_probabilities", []),
            each["stop_type"],
        ]
        for each in answers
    }


def joined_events(events: list[dict[str, Any]]) -> Any:
    tokens = [event for event in events if event["type"] == "token"]
    assert [event["i"] for event in tokens] == list(range(len(tokens)))
    started, end = events[0], events[-1]
    assert started.pop("type") == "started" and end.pop("type") == "end"
    text = "".join(event["t"] for event in tokens)
    return started | {"text": text, "tokens": [id for e in tokens for id in e["ids"]]} | end


def join_native(stream: bytes) -> Any:
    return joined_events(named(stream))


def join_lines(stream: bytes) -> Any:
    return joined_events([json.loads(line) for line in stream.decode().splitlines()])


def join_ollama(stream: bytes) -> Any:
    lines = [json.loads(line) for line in stream.decode().splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return parts_of_ollama(lines), lines[-1]["done_reason"], lines[-1]["eval_count"]


def whole_ollama(answer: dict[str, Any]) -> Any:
    return parts_of_ollama([answer]), answer["done_reason"], answer["eval_count"]


def parts_of_ollama(lines: list[dict[str, Any]]) -> Any:
    parts = [line.get("message", line) for line in lines]
    texts = [part.get("content", part.get("response")) for part in parts]
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    scores = [score for line in lines for score in line.get("logprobs", ())]
    return "".join(texts), "".join(part.get("thinking", "") for part in parts), calls, scores


def unchanged(answer: Any) -> Any:
    return answer


@dataclass(frozen=True)
class Client:
    model: Any
    read: Callable[[Any, Any], Any]
    answer: type[Answer[Any]]
    fields: dict[str, Any]
    join: Callable[[bytes], Any]
    whole: Callable[[Any], Any]


TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
CHAT = {"messages": USER} | TOOLS
TEXT = {"prompt": "Once"}
CUSTOM = {"type": "custom", "name": "get_time"}
GROUP = {"type": "namespace", "name": "now", "tools": [CUSTOM]}
CLIENTS = {
    "chat": Client(ChatBody, read_chat, ChatAnswer, CHAT | CHOICES, join_chat, whole_chat),
    "completion": Client(
        CompletionBody, read_openai_completion, CompletionAnswer,
        TEXT | CHOICES, join_completion, whole_completion,
    ),
    "messages": Client(
        MessagesBody, read_messages, MessageAnswer,
        {"messages": USER, "max_tokens": 9,
         "tools": [{"name": "get_time", "input_schema": SCHEMA}]},
        join_message, unchanged,
    ),
    "responses": Client(
        ResponsesBody, read_response, ResponseAnswer,
        {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
        join_response, whole_response,
    ),
    "llama-server": Client(
        LlamaServerBody, read_completion, TextAnswer,
        TEXT | CHOICES | {"n_probs": 1, "return_tokens": True},
        join_llama_server, whole_llama_server,
    ),
    "native": Client(InferenceBody, read_inference, NativeAnswer, TEXT, join_native, unchanged),
    "native lines": Client(InferenceBody, read_inference, NativeLines, TEXT, join_lines, unchanged),
    "ollama's chat": Client(
        OllamaChatBody, read_ollama_chat, OllamaChatAnswer,
        {"model": "tiny", "logprobs": True, "top_logprobs": 1} | CHAT,
        join_ollama, whole_ollama,
    ),
    "ollama's text": Client(
        OllamaGenerateBody, read_ollama_text, OllamaTextAnswer,
        {"model": "tiny"} | TEXT, join_ollama, whole_ollama,
    ),
}  # fmt: skip
SCORES = {"logprobs": 1, "prompt_logprobs": 1}
FEW_FIELDS = ["index", "content", "tokens", "stop_type"]
CLIENTS |= {
    f"{name}, {what}": replace(CLIENTS[name], fields=CLIENTS[name].fields | fields)
    for name, what, fields in (
        ("chat", "custom", {"tools": [{"type": "custom", "custom": {"name": "get_time"}}]}),
        ("responses", "custom", {"tools": [CUSTOM, GROUP]}),
        ("chat", "scored", {"logprobs": True, "top_logprobs": 1}),
        ("completion", "echo and scores", {"echo": True, **SCORES}),
        ("responses", "scored", {"top_logprobs": 1}),
        ("llama-server", "some fields", {"n_probs": 0, "response_fields": FEW_FIELDS}),
    )
}


def test_every_dialects_answers_are_read() -> None:
    """Each answer that a dialect streams has a client here."""
    kinds: list[type[Answer[Any]]] = [*Answer.__subclasses__()]
    for kind in kinds:
        kinds += kind.__subclasses__()
    own = {k for k in kinds if k.__module__.startswith("worker.api.dialects.")}
    assert {k for k in own if not isabstract(k)} <= {client.answer for client in CLIENTS.values()}


WORDS = st.text(alphabet="aé\n <{\"'&字", max_size=12)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "input"]), WORDS, min_size=1)
CALLS = st.builds(
    lambda name, arguments: (
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        + "\n</tool_call>"
    ),
    st.sampled_from(["get_time", "now__get_time"]),
    ARGUMENTS,
)
MISTAKES = st.lists(
    st.sampled_from(['"a": "b\\\\"', *'{}[],:,:"1', '"a"', "true"]), max_size=8
).map(
    lambda parts: (
        f'<tool_call>{{"name": "get_time", "arguments": {{{" ".join(parts)}}}}}</tool_call>'
    )
)
PARTS = st.one_of(
    WORDS, CALLS, MISTAKES, WORDS.map("<think>{}</think>".format), st.just("<tool_call>")
)
OUTPUTS = st.lists(PARTS, max_size=5).map("".join)
ENDS = st.sampled_from(get_args(StopReason))


@st.composite
def stories(draw: st.DrawFn) -> list[list[StreamEvent]]:
    """Generate the frames of one choice."""
    output = draw(OUTPUTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(output)), max_size=20)) | {0, len(output)})
    texts = [output[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    if draw(st.booleans()) and texts:  # cut off
        texts = texts[: draw(st.integers(0, len(texts)))]
    events: list[StreamEvent] = [Started(0, 1)]
    events.append(PromptScored(0, (score("<s>", float("nan")), score("Once"))))
    events += [Token(0, text, (n,), (score(text),)) for n, text in enumerate(texts)]
    reason = draw(ENDS)
    tail = (score("<|end|>"),) if draw(st.booleans()) else ()
    stop = "!" if reason == "STOP_SEQUENCE" else None
    events.append(Finished(0, reason, len(texts), 1.0, stop, 1.0, tail))
    frames = []
    while events:
        n_taken = draw(st.integers(1, 4))
        frames.append(events[:n_taken])
        del events[:n_taken]
    return frames


def score(text: str, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(1, text.encode(), logprob, (TokenLogprob(2, b"x", -1.0),))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Frame]:
    """Generate the frames of two choices, in some order of arrival."""
    queues = [draw(stories()), draw(stories())]
    arrived: list[Frame] = []
    while any(queues):
        index = draw(st.integers(0, 1)) if all(queues) else int(not queues[0])
        arrived.append((index, queues[index].pop(0)))
    return arrived


def answer_of(client: Client) -> Answer[Any]:
    body = client.model.model_validate(client.fields)
    request = replace(client.read(body, STATE), streams=True)
    inference = inference_of(request, STATE, None)
    choices = []
    for index, work in enumerate(inference.requests):
        job = Job(index, work, STATE.metrics, lambda job, error: None)
        job.accept(Accepted(index, 3))
        echo = "Once" if request.echo else ""
        choices.append(Choice(index, job, inference.parser_of, echo))
    return client.answer(body, request, choices, STATE)


def streamed(answer: Answer[Any], frames: Iterable[Frame]) -> list[bytes]:
    async def arriving() -> AsyncIterator[list[StreamEvent]]:
        for index, events in frames:
            if index < len(answer.choices) and (sent := sent_to(answer.asked, events)):
                sent = [of(index, event) for event in sent]
                answer.choices[index].job.feed(sent)
                yield sent

    async def chunks() -> list[bytes]:
        return [chunk async for chunk in _streamed(answer, arriving())]

    return asyncio.run(chunks())


def sent_to(request: Generate, events: list[StreamEvent]) -> list[StreamEvent]:
    """Return the events as the engine sends them, with log-probabilities only if requested."""
    sent: list[StreamEvent] = []
    for event in events:
        match event:
            case PromptScored() if request.prompt_logprobs is None:
                continue
            case Token() if request.sampling.logprobs is None:
                sent.append(structs.replace(event, logprobs=()))
            case Finished() if request.sampling.logprobs is None:
                sent.append(structs.replace(event, logprobs=()))
            case _:
                sent.append(event)
    return sent


@pytest.mark.parametrize("name", CLIENTS)
@settings(max_examples=30, deadline=None)
@given(frames=arrivals())
def test_an_assembled_stream_is_the_whole_answer(name: str, frames: list[Frame]) -> None:
    client = CLIENTS[name]
    answer = answer_of(client)
    scores: list[tuple[Choice, Any, list[TokenLogprob]]] = []
    forget = Choice.forget_scores

    def kept(choice: Choice) -> None:
        scores.append((choice, choice.prompt_logprobs, list(choice.logprobs)))
        forget(choice)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choice, "forget_scores", kept)
        stream = b"".join(streamed(answer, frames))
    assert not any(choice.logprobs for choice in answer.choices), "what was sent is not kept"
    for choice, prompt_logprobs, scored in scores:  # the whole has them
        choice.prompt_logprobs = prompt_logprobs or choice.prompt_logprobs
        choice.logprobs += scored
    whole = json.loads(b"".join(in_parts(answer.whole())))
    assert client.join(stream) == client.whole(whole)
    check_that_the_last_event_alone_is_the_end(client, stream)


def check_that_the_last_event_alone_is_the_end(client: Client, stream: bytes) -> None:
    """As a gateway reads it: not the end of one choice, after which the other continues."""
    media_type = client.answer.media_type.partition(";")[0]
    tail, has_ended = Tail(client.answer.form, media_type), []
    separator = b"\n" if media_type == NDJSON else b"\n\n"
    for event in stream.split(separator)[:-1]:  # a worker may be lost after each
        tail.whole(event + separator)
        has_ended.append(tail.has_ended)
    assert has_ended == [False] * (len(has_ended) - 1) + [True]


@pytest.mark.parametrize("reason", get_args(StopReason))
@pytest.mark.parametrize("ends", ['a"', 'a", ', 'a"}}'])
def test_ollama_omits_a_call_that_was_cut_off(reason: StopReason, ends: str) -> None:
    called = '<tool_call>\n{"name": "get_time", "arguments": {"city": "b"}}\n</tool_call>\n'
    texts = called, '<tool_call>\n{"name": "get_time", "arguments": {"city": "', ends
    events: list[StreamEvent] = [
        Started(0, 1),
        *(Token(0, text, (n,)) for n, text in enumerate(texts)),
    ]
    answer = answer_of(CLIENTS["ollama's chat"])
    stream = b"".join(streamed(answer, [(0, [*events, Finished(0, reason, 3, 1.0)])]))
    whole = json.loads(b"".join(in_parts(answer.whole())))
    is_cut = reason != "EOS" and not ends.endswith("}}")
    cities = ["b"] if is_cut else ["b", "a"]
    for _, _, calls, _ in (join_ollama(stream)[0], whole_ollama(whole)[0]):
        assert [call["function"]["arguments"]["city"] for call in calls] == cities


@pytest.mark.parametrize("reason", get_args(StopReason))
def test_a_call_without_its_end_is_complete_if_the_model_ended_the_answer(
    reason: StopReason,
) -> None:
    """Its arguments get the last brace."""
    called = "<tool_call>\n<function=get_time>\n<parameter=city>\na\n</parameter>\n"
    choice = answer_of(CLIENTS["messages"]).choices[0]
    for event in (Started(0, 1), Token(0, called, (1,)), Finished(0, reason, 1, 1.0)):
        for delta in choice.read(event):
            choice.add(delta)
    assert choice.calls[0].text == '{"city": "a"' + "}" * (reason == "EOS")
    assert choice.is_cut == (reason != "EOS")


@pytest.mark.parametrize(
    ("written", "before"),
    [
        ('{"city": "a" "b"}', {"city": "a"}),
        ('{"city": "a"]', {"city": "a"}),
        ('{"city" "a"}', {}),
        ('{"a": [1, {"b": "\\"[c", "d" 5}], "e": 1}', {"a": [1, {"b": '"[c'}]}),
        ('{"a": {"b": [[2], [3 4]]}}', {"a": {"b": [[2], [3]]}}),
        ('{"a": 1, , "b": 2}', {"a": 1}),
        ('{"a": }', {}),
        ('{"a": [1}, "e": 2}', {"a": [1]}),
    ],
)
def test_arguments_that_are_not_json_arrive_inside_an_object(
    written: str, before: dict[str, Any]
) -> None:
    """The object has all that the model wrote."""
    called = f'<tool_call>{{"name": "get_time", "arguments": {written}}}</tool_call>'
    events: list[StreamEvent] = [Started(0, 1), Token(0, called, (1,)), Finished(0, "EOS", 1, 1.0)]
    ollama, anthropic = answer_of(CLIENTS["ollama's chat"]), answer_of(CLIENTS["messages"])
    answers = [join_ollama(b"".join(streamed(ollama, [(0, events)]))), whole_ollama(ollama.whole())]
    found = [call["function"]["arguments"] for (_, _, calls, _), *_ in answers for call in calls]
    message = join_message(b"".join(streamed(anthropic, [(0, events)])))
    found += [block["input"] for block in message["content"]]
    found += [block["input"] for block in anthropic.whole()["content"]]
    assert found == [{**before, "input": written}] * 4


@pytest.mark.parametrize("name", CLIENTS)
@settings(max_examples=10, deadline=None)
@given(frames=arrivals(), at=st.integers(1, 5))
def test_a_stream_that_fails_ends_with_the_failure_alone(
    name: str, frames: list[Frame], at: int
) -> None:
    """Whatever came before: a single last event that the dialect defines as an end."""
    client, lost = CLIENTS[name], Failed(0, EngineCrashed("The engine died."))
    answer = answer_of(client)
    before = [frame for frame in frames if frame[0] == 0][:-1]
    stream = b"".join(streamed(answer, [*before[:at], (0, [lost])]))
    separator = b"\n" if client.answer.media_type == NDJSON else b"\n\n"
    events = [event + separator for event in stream.split(separator)[:-1]]
    n_ends = [client.answer.form.is_end(event) for event in events]
    assert n_ends == [False] * (len(events) - 1) + [True]
    assert b"The engine died." in events[-1]


def test_the_item_in_which_a_response_failed_is_incomplete() -> None:
    """An agent would execute a call that is marked as completed."""
    texts = "I look.", '<tool_call>\n{"name": "get_time", "arguments": {"city": "b'
    events: list[StreamEvent] = [Started(0, 1)]
    events += [Token(0, text, (n,)) for n, text in enumerate(texts)]
    events.append(Failed(0, EngineCrashed("The engine died.")))
    stream = b"".join(streamed(answer_of(CLIENTS["responses"]), [(0, events)]))
    failed = named(stream)[-1]["response"]
    items = [(item["type"], item["status"]) for item in failed["output"]]
    assert items == [("message", "completed"), ("function_call", "incomplete")]


@pytest.mark.parametrize("kind", WorkerError.__subclasses__())
def test_a_response_fails_with_a_code_that_openai_s_types_know(kind: type[WorkerError]) -> None:
    """Typed clients reject the worker's own codes."""
    error = kind("No.", prompt_tokens=9, context_length=8)
    stream = b"".join(streamed(answer_of(CLIENTS["responses"]), [(0, [Failed(0, error)])]))
    for event in (stream, ResponseAnswer.form.failure(error, b"", b"")):
        failure = ResponseError.model_validate(named(event)[-1]["response"]["error"], strict=True)
        assert failure.code == ("invalid_prompt" if kind.status < 499 else "server_error")
        assert failure.to_dict()["type"] == kind.code.lower()


def test_a_response_has_the_scores_of_its_text_s_own_tokens() -> None:
    """Without those of reasoning, calls, marks and the end, even if a text came late."""
    call = '{"name": "get_time", "arguments": {}}'
    written = ["<think>", "Hm", "</think>", "One", " <", "tool", " two ", "<tool_call>", call]
    events: list[StreamEvent] = [Started(0, 1)]
    events += [Token(0, text, (n,), (score(text),)) for n, text in enumerate(written)]
    events.append(Finished(0, "EOS", 9, 1.0, None, 1.0, (score("<|end|>"),)))
    answer = answer_of(CLIENTS["responses, scored"])
    texts, _ = join_response(b"".join(streamed(answer, [(0, [event]) for event in events])))
    kinds = [block.kind for block in answer.choices[0].blocks]
    assert kinds == ["reasoning", "text", "call"]
    found = ["".join(each["token"] for each in scores) for _, scores in texts]
    assert found == ["", "One <tool two ", ""]


def test_tokens_are_counted_as_they_are_read() -> None:
    choice = answer_of(next(iter(CLIENTS.values()))).choices[0]
    tokens = [Token(0, "a", (1,)), Token(0, "b", (2, 3))]
    events: list[StreamEvent] = [Started(0, 0), *tokens]
    choice.job.feed(events)
    counts = []
    for event in events:
        choice.read(event)
        counts.append(choice.tokens_out)
    assert counts == [0, 1, 3] and choice.job.tokens_out == 3
