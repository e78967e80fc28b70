"""OpenAI's responses: one object, or the events of its stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from worker.api.chat.blocks import BlockAnswer, BlockStep, Event
from worker.api.chat.message import Block, Choice
from worker.api.chat.request import Generate
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.http.encoding import sse
from worker.api.http.errors import error_object
from worker.api.http.operation import StreamForm
from worker.api.http.state import AppState
from worker.errors import WorkerError

_DELTAS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}


class ResponseAnswer(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ResponseStream(BlockAnswer[ResponsesBody]):
    def __init__(
        self, body: ResponsesBody, asked: Generate, choices: Sequence[Choice], state: AppState
    ) -> None:
        super().__init__(body, asked, choices, state)
        self._created = int(time.time())
        self._ids: dict[int, str] = {}
        self._n_events = 0

    def whole(self) -> dict[str, Any]:
        return self._response(self._end_status)

    def failure(self, error: WorkerError) -> bytes:
        failed = self._response("failed") | {"error": error_object(error)}
        return self._encoded({"type": "response.failed", "response": failed})

    def _encoded(self, event: Event) -> bytes:
        number, self._n_events = self._n_events, self._n_events + 1
        return sse({**event, "sequence_number": number})

    def _first_events(self) -> Iterator[Event]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response("in_progress")}

    def _last_events(self) -> Iterator[Event]:
        status = self._end_status
        yield {"type": f"response.{status}", "response": self._response(status)}

    def _step_events(self, step: BlockStep) -> Iterator[Event]:
        block, index = step.block, step.number
        place = {"output_index": index, "item_id": self._id_of(index, block)}
        if block.kind != "call":
            place["content_index"] = 0
        match step.what:
            case "begun":
                item = self._item(index, block, "in_progress")
                yield {"type": "response.output_item.added", "output_index": index,
                       "item": item}  # fmt: skip
                if block.kind == "text":
                    yield {"type": "response.content_part.added", **place, "part": _part(block)}
            case "grown":
                extra: Event = {"logprobs": []} if block.kind == "text" else {}
                yield {"type": f"{_DELTAS[block.kind]}.delta", **place, "delta": step.text, **extra}
            case "ended":
                whole: Event = {"arguments" if block.kind == "call" else "text": block.text}
                if block.kind == "text":
                    whole["logprobs"] = []
                if block.kind == "call":
                    whole["name"] = block.name
                yield {"type": f"{_DELTAS[block.kind]}.done", **place, **whole}
                if block.kind == "text":
                    yield {"type": "response.content_part.done", **place, "part": _part(block)}
                yield {"type": "response.output_item.done", "output_index": index,
                       "item": self._ended_item(index, block)}  # fmt: skip

    # --- the whole -----------------------------------------------------------------------

    @property
    def _end_status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    def _id_of(self, index: int, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        return self._ids.setdefault(index, f"{prefix}_{uuid.uuid4().hex}")

    def _ended_item(self, index: int, block: Block) -> dict[str, Any]:
        """A finished item; the last one of an answer that was cut off is incomplete."""
        finished, is_last = self.choice.finished, index == len(self._blocks()) - 1
        is_cut = finished is not None and is_last and self._end_status == "incomplete"
        return self._item(index, block, "incomplete" if is_cut else "completed")

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._id_of(index, block), "status": status}
        begun = status == "in_progress"
        match block.kind:
            case "text":
                content = [] if begun else [_part(block)]
                return {**head, "type": "message", "role": "assistant", "content": content}
            case "reasoning":
                thought = [] if begun else [{"type": "reasoning_text", "text": block.text}]
                return {**head, "type": "reasoning", "summary": [], "content": thought}
            case "call":
                call = {"call_id": block.id, "name": block.name, "arguments": block.text}
                return {**head, "type": "function_call", **call}

    def _response(self, status: str) -> dict[str, Any]:
        body, ended = self.body, status != "in_progress"
        form = body.text.format
        return {
            "id": self.asked.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self.state.model_name,
            "output": [self._ended_item(i, block) for i, block in enumerate(self._blocks())]
            if ended
            else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tools": [tool.model_dump() for tool in body.tools],
            "tool_choice": _choice(body),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": {"type": form.type if form is not None else "text"}},
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "previous_response_id": None,
            "truncation": "disabled",
            "store": False,
            "metadata": {},
            "usage": self._usage() if ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        job, n_out = self.choice.job, self.choice.tokens_out
        return {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens": n_out,
            "output_tokens_details": {"reasoning_tokens": self.choice.reasoning_tokens},
            "total_tokens": job.prompt_tokens + n_out,
        }


def _choice(body: ResponsesBody) -> object:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _part(block: Block) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


# --- the end of a stream, seen from outside ------------------------------------------------

_ENDS = tuple(f"event: response.{end}\n".encode() for end in ("completed", "incomplete", "failed"))


def _failure(error: WorkerError, first: bytes, last: bytes) -> bytes:
    """`response.failed` with the response of the stream's first event and the next number."""
    response = _data(first).get("response") or {
        "id": "", "object": "response", "created_at": int(time.time()), "output": [],
    }  # fmt: skip
    return sse(
        {
            "type": "response.failed",
            "response": {**response, "status": "failed", "error": error_object(error)},
            "sequence_number": int(_data(last).get("sequence_number", -1)) + 1,
        }
    )


def _data(event: bytes) -> dict[str, Any]:
    data = event.rpartition(b"data: ")[2]
    return json.loads(data) if data else {}


STREAM = StreamForm(lambda event: event.startswith(_ENDS), _failure)
