"""The answers of `/v1/responses`, as one object or the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from worker.api.chat.answer import BlockAnswer, BlockStep, Event
from worker.api.chat.choice import Block
from worker.api.chat.delta import Delta
from worker.api.chat.request import Chat
from worker.api.chat.scored import count_scores, scored_tokens
from worker.api.chat.timings import timings
from worker.api.dialects.responses.schema import ResponsesBody, ToolChoice
from worker.api.http.encoding import sse
from worker.api.http.errors import error_object
from worker.api.http.operation import StreamForm
from worker.errors import Cancelled, WorkerError
from worker.wire.messages import TokenLogprob


class _Item(NamedTuple):
    """How a kind of block appears in an answer."""

    type: str
    prefix: str
    """Prefix of its id."""
    events: str
    """Prefix of its events' types."""
    field: str
    """The field with its text."""


_ITEMS = {
    "text": _Item("message", "msg", "response.output_text", "text"),
    "reasoning": _Item("reasoning", "rs", "response.reasoning_text", "text"),
    "call": _Item("function_call", "fc", "response.function_call_arguments", "arguments"),
    "custom": _Item("custom_tool_call", "ctc", "response.custom_tool_call_input", "input"),
}
"""By kind of block."""


# --- the end of a stream ------------------------------------------------

_ENDS = tuple(f"event: response.{end}\n".encode() for end in ("completed", "incomplete", "failed"))


def _failure(error: WorkerError, first: bytes, last: bytes) -> bytes:
    """`response.failed`, with the response of the first event and the number after the last."""
    response = _data(first).get("response") or {
        "id": "", "object": "response", "created_at": int(time.time()), "output": [],
    }  # fmt: skip
    return sse(
        {
            "type": "response.failed",
            "response": {**response, "status": "failed", "error": _error(error)},
            "sequence_number": int(_data(last).get("sequence_number", -1)) + 1,
        }
    )


def _error(error: WorkerError) -> dict[str, Any]:
    """A response's `error`. Its codes are a closed set, so `type` has the worker's own code."""
    found = error_object(error)
    code = "server_error" if error.status >= Cancelled.status else "invalid_prompt"
    return found | {"code": code, "type": found["code"]}


def _data(event: bytes) -> dict[str, Any]:
    """The data of an encoded event, which may also have an id."""
    lines = [line for line in event.split(b"\n") if line.startswith(b"data: ")]
    return json.loads(lines[0].removeprefix(b"data: ")) if lines else {}


STREAM = StreamForm(lambda event: event.startswith(_ENDS), _failure)


# --- answers -----------------------------------------------------------------------------


class ResponseAnswer(BlockAnswer[ResponsesBody]):
    form = STREAM

    def __post_init__(self) -> None:
        super().__post_init__()
        self._created = int(time.time())
        assert isinstance(self.asked.input, Chat), "`chat_of` returns one"
        self._within = {tool.name: tool.within for tool in self.asked.input.tools}
        self._n_events = 0
        self._sent: dict[int, list[TokenLogprob]] = {}
        """By block index, the log-probabilities sent in its deltas; the last events of the block
        and of the stream repeat them."""

    def whole(self) -> dict[str, Any]:
        return self._response(self._status)

    def failure(self, error: WorkerError) -> bytes:
        failed = self._response("failed") | {"error": _error(error)}
        return self.encoded({"type": "response.failed", "response": failed})

    def encoded(self, event: Event) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        numbered = {**event, "sequence_number": number}
        return sse(numbered, is_large=self.asked.sampling.logprobs is not None)

    def n_scores(self, delta: Delta) -> int:
        repeated = self._sent.values() if self.ends_block(delta) else ()
        return super().n_scores(delta) + sum(map(count_scores, repeated))

    def first_events(self) -> Iterator[Event]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response("in_progress")}

    def last_events(self) -> Iterator[Event]:
        whole = {"response": self.whole(), "timings": timings(self.choice)}
        yield {"type": f"response.{self._status}", **whole}

    def step_events(self, what: BlockStep, index: int, block: Block, text: str) -> Iterator[Event]:
        kind, place = _ITEMS[block.kind], {"output_index": index, "item_id": self._id_of(index)}
        if has_part := not block.is_call:
            place["content_index"] = 0
        match what:
            case "start":
                begun = self._item(index, "in_progress")
                yield {"type": "response.output_item.added", "output_index": index, "item": begun}
                if has_part:
                    part = self._part(index, "", ())
                    yield {"type": "response.content_part.added", **place, "part": part}
            case "delta":
                extra: Event = {}
                if block.kind == "text":
                    scores, block.scores = block.scores, []
                    self._sent.setdefault(index, []).extend(scores)
                    extra = {"logprobs": scored_tokens(scores)}
                yield {"type": f"{kind.events}.delta", **place, "delta": text, **extra}
            case "stop":
                whole: Event = {kind.field: block.text}
                if block.kind == "text":
                    whole["logprobs"] = self._scored(index)
                if block.kind == "call":
                    whole["name"] = self._named(block)["name"]
                yield {"type": f"{kind.events}.done", **place, **whole}
                if has_part:
                    part = self._part(index, block.text, self._scored(index))
                    yield {"type": "response.content_part.done", **place, "part": part}
                ended = self._ended_item(index, self._status)
                yield {"type": "response.output_item.done", "output_index": index, "item": ended}

    # --- the whole -----------------------------------------------------------------------

    @property
    def _status(self) -> Literal["in_progress", "completed", "incomplete"]:
        if self.choice.finished is None:
            return "in_progress"
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def _id_of(self, index: int) -> str:
        prefix = _ITEMS[self.choice.blocks[index].kind].prefix
        return f"{prefix}_{self.asked.id.partition('_')[2]}{index}"

    def _scored(self, index: int) -> Iterator[dict[str, Any]]:
        return scored_tokens((*self._sent.get(index, ()), *self.choice.blocks[index].scores))

    def _ended_item(self, index: int, status: str) -> dict[str, Any]:
        """A finished item. If the response was cut off or failed, its last item is incomplete."""
        is_cut = index == len(self.choice.blocks) - 1 and status != "completed"
        return self._item(index, "incomplete" if is_cut else "completed")

    def _item(self, index: int, status: str) -> dict[str, Any]:
        block = self.choice.blocks[index]
        text = "" if status == "in_progress" else block.text
        kind = _ITEMS[block.kind]
        head = {"id": self._id_of(index), "status": status, "type": kind.type}
        if block.is_call:
            return {**head, "call_id": block.id, **self._named(block), kind.field: text}
        own: dict[str, Any] = {"role": "assistant"} if block.kind == "text" else {"summary": []}
        content = [self._part(index, text, self._scored(index))] if text else []
        return {**head, **own, "content": content}

    def _named(self, call: Block) -> dict[str, str]:
        """The name of a call's tool, as the client defined it."""
        if (within := self._within.get(call.name)) is None:
            return {"name": call.name}
        return {"namespace": within[0], "name": within[1]}

    def _part(self, index: int, text: str, logprobs: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The single content part of a text or of reasoning."""
        if self.choice.blocks[index].kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _response(self, status: str) -> dict[str, Any]:
        body, ended = self.body, status != "in_progress"
        n_blocks = len(self.choice.blocks) if ended else 0
        form, choice = body.text.format, body.tool_choice
        return {
            "id": self.asked.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self.state.name_of(self.asked.model),
            "output": [self._ended_item(index, status) for index in range(n_blocks)],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": self.asked.sampling.temperature,
            "top_p": self.asked.sampling.top_p,
            "top_logprobs": body.top_logprobs,
            "tools": [tool.in_answer() for tool in body.tools],
            "tool_choice": choice.model_dump(exclude_unset=True)
            if isinstance(choice, ToolChoice)
            else choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": "text"} if form is None else form.in_answer},
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "previous_response_id": None,
            "truncation": "disabled",
            "store": False,
            "metadata": body.metadata,
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        choice, job = self.choice, self.choice.job
        return {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.tokens_out,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": job.prompt_tokens + choice.tokens_out,
        }
