"""Anthropic's answers: one message, or the events of its stream.

Runs on the API process's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any, Literal

import pydantic_core
from typing_extensions import TypedDict

from worker.api.blocks import Blocks, BlockStep, OutputBlock
from worker.api.encoding import sse
from worker.api.errors import anthropic_error, http_status
from worker.api.output import Frame, Output
from worker.errors import WorkerError
from worker.supervisor.job import StreamEvent
from worker.wire.messages import Finished, Started

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int


class MessageAnswer(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


class MessageStream:
    """One answer, whole or streamed."""

    def __init__(self, id: str, model: str, output: Output) -> None:
        self._id, self._model, self._output = id, model, output
        self._blocks = Blocks()

    async def whole(self, frames: AsyncIterable[Frame]) -> MessageAnswer:
        async for _, frame in frames:
            for event in frame:
                for _ in self._blocks.take(self._output.take(event)):
                    pass
        return self._message([_block(block) for block in self._blocks.all])

    async def chunks(self, frames: AsyncIterable[Frame]) -> AsyncIterator[bytes]:
        async for _, frame in frames:
            encoded: list[bytes] = []
            try:
                for event in frame:
                    encoded += map(sse, self._events(event))
            except WorkerError as error:
                body = anthropic_error(error.message, http_status(error))
                yield b"".join(encoded) + sse({"type": "error", "error": body})
                return
            if encoded:
                yield b"".join(encoded)

    def _events(self, event: StreamEvent) -> Iterator[dict[str, Any]]:
        pieces = self._output.take(event)
        if isinstance(event, Started):
            yield {"type": "message_start", "message": self._message([])}
        for step in self._blocks.take(pieces):
            yield _step(step)
        if isinstance(event, Finished):
            for step in self._blocks.finish():
                yield _step(step)
            ended = self._message([])
            delta = {name: ended[name] for name in ("stop_reason", "stop_sequence")}
            yield {"type": "message_delta", "delta": delta, "usage": ended["usage"]}
            yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]]) -> MessageAnswer:
        output, job = self._output, self._output.job
        reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
        finished = output.finished
        if finished is not None:
            words: dict[str, Literal["end_turn", "max_tokens", "tool_use"]]
            words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
            reason = words[output.finish_reason]
            if reason == "end_turn" and finished.stop_sequence is not None:
                reason = "stop_sequence"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": finished.stop_sequence if finished is not None else None,
            "usage": {
                "input_tokens": job.prompt_tokens - job.cached_tokens,
                "output_tokens": finished.tokens_out if finished is not None else job.tokens_out,
                "cache_read_input_tokens": job.cached_tokens,
                "cache_creation_input_tokens": 0,
            },
        }


def _step(step: BlockStep) -> dict[str, Any]:
    index = step.block.index
    match step.what:
        case "begun":
            return {
                "type": "content_block_start",
                "index": index,
                "content_block": _block(step.block),
            }
        case "grown":
            kind, name = _DELTAS[step.block.kind]
            delta = {"type": kind, name: step.text}
            return {"type": "content_block_delta", "index": index, "delta": delta}
        case "ended":
            return {"type": "content_block_stop", "index": index}


def _block(block: OutputBlock) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            arguments = _parsed(block.text)
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def _parsed(arguments: str) -> dict[str, Any]:
    """The arguments of a call; if it was cut off, those that are complete."""
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
