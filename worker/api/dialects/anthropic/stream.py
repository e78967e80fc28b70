"""Anthropic's answers: a message, the events of a stream, or an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from worker.api.chat.answer import BlockAnswer, BlockStep, Event
from worker.api.chat.choice import Block
from worker.api.chat.parse.readable import Readable
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.api.http.encoding import sse
from worker.api.http.operation import ErrorForm, StreamForm
from worker.errors import ContextLengthExceeded, WorkerError

# --- failures ----------------------------------------------------------------------------

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(TypedDict):
    error_code: str


class AnthropicErrorObject(TypedDict):
    type: str
    message: str
    details: NotRequired[AnthropicErrorDetails]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


def _error(error: WorkerError) -> dict[str, Any]:
    kind, message = _ERROR_TYPES.get(error.status, "api_error"), error.message
    if isinstance(error, ContextLengthExceeded):  # in the words that Anthropic's clients search for
        n_tokens, most = error.details["prompt_tokens"], error.details["context_length"]
        message = f"prompt is too long: {n_tokens} tokens > {most} maximum"
    found: dict[str, Any] = {"type": kind, "message": message}
    if (code := error.details.get("error_code")) is not None:
        found["details"] = {"error_code": code}
    return {"type": "error", "error": found}


ERRORS = ErrorForm(
    lambda error, request_id: _error(error) | {"request_id": request_id}, AnthropicError
)
STREAM = StreamForm(
    lambda event: event.startswith((b"event: message_stop\n", b"event: error\n")),
    lambda error, first, last: sse(_error(error)),
)


# --- answers -----------------------------------------------------------------------------

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageAnswer(BlockAnswer[MessagesBody]):
    form = STREAM

    def whole(self) -> dict[str, Any]:
        return self._message([_content(block) for block in self.choice.blocks])

    def first_events(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message([])}]

    def step_events(self, what: BlockStep, index: int, block: Block, text: str) -> list[Event]:
        event: Event = {"type": f"content_block_{what}", "index": index}
        if what == "start":
            self._readable = Readable()
            return [event | {"content_block": _content(replace(block, parts=[]))}]
        if block.kind == "call":
            text = self._readable.take(text) if what == "delta" else self._readable.finish()
        kind, name = _DELTAS[block.kind]
        delta = {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}}
        return [*([delta] if text else []), *([event] if what == "stop" else [])]

    def last_events(self) -> list[Event]:
        ended = self._message([])
        delta = {"stop_reason": ended["stop_reason"], "stop_sequence": ended["stop_sequence"]}
        last = {"type": "message_delta", "delta": delta, "usage": ended["usage"]}
        return [last, {"type": "message_stop"}]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        choice, job, finished = self.choice, self.choice.job, self.choice.finished
        reason = None if finished is None else _REASONS[choice.finish_reason]
        stop_sequence = None if finished is None else finished.stop_sequence
        if reason == "end_turn" and stop_sequence is not None:
            reason = "stop_sequence"
        return {
            "id": self.asked.id,
            "type": "message",
            "role": "assistant",
            "model": self.state.name_of(self.asked.model),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": job.prompt_tokens - job.cached_tokens,
                "output_tokens": choice.tokens_out,
                "cache_read_input_tokens": job.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens},
            },
        }


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call" | "custom":
            head = {"type": "tool_use", "id": block.id, "name": block.name}
            return head | {"input": block.arguments}
