"""Anthropic's answers: one message, or the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import pydantic_core
from typing_extensions import TypedDict

from worker.api.chat.blocks import BlockAnswer, BlockStep, Event
from worker.api.chat.message import Block
from worker.api.dialects.anthropic.errors import failure
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.errors import WorkerError

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
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


class MessageStream(BlockAnswer[MessagesBody]):
    def whole(self) -> MessageAnswer:
        return self._message([_block(block) for block in self._blocks()])

    def failure(self, error: WorkerError) -> bytes:
        return failure(error)

    def _first_events(self) -> list[Event]:
        return [{"type": "message_start", "message": self._message([])}]

    def _step_events(self, step: BlockStep) -> list[Event]:
        index = step.number
        match step.what:
            case "begun":
                block = _block(step.block)
                return [{"type": "content_block_start", "index": index, "content_block": block}]
            case "grown":
                kind, name = _DELTAS[step.block.kind]
                delta = {"type": kind, name: step.text}
                return [{"type": "content_block_delta", "index": index, "delta": delta}]
            case "ended":
                return [{"type": "content_block_stop", "index": index}]

    def _last_events(self) -> list[Event]:
        ended = self._message([])
        delta = {"stop_reason": ended["stop_reason"], "stop_sequence": ended["stop_sequence"]}
        last = {"type": "message_delta", "delta": delta, "usage": ended["usage"]}
        return [last, {"type": "message_stop"}]

    def _message(self, content: list[dict[str, Any]]) -> MessageAnswer:
        choice, job = self.choice, self.choice.job
        reason: StopReason | None = None
        finished = choice.finished
        if finished is not None:
            reason = _REASONS[choice.finish_reason]
            if reason == "end_turn" and finished.stop_sequence is not None:
                reason = "stop_sequence"
        return {
            "id": self.asked.id,
            "type": "message",
            "role": "assistant",
            "model": self.state.model_name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": finished.stop_sequence if finished is not None else None,
            "usage": {
                "input_tokens": job.prompt_tokens - job.cached_tokens,
                "output_tokens": choice.tokens_out,
                "cache_read_input_tokens": job.cached_tokens,
                "cache_creation_input_tokens": 0,
            },
        }


def _block(block: Block) -> dict[str, Any]:
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
