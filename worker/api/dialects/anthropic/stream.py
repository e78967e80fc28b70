"""Anthropic's answers: one message, or the events of its stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from worker.api.chat.dialect import BlockAnswer, BlockStep, Event
from worker.api.chat.message import Block
from worker.api.dialects.anthropic.errors import STREAM
from worker.api.dialects.anthropic.schema import MessagesBody

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

    def step_events(self, step: BlockStep) -> list[Event]:
        event: Event = {"type": f"content_block_{_EVENTS[step.what]}", "index": step.at}
        match step.what:
            case "begun":
                return [event | {"content_block": _content(replace(step.block, parts=[]))}]
            case "grown":
                kind, name = _DELTAS[step.block.kind]
                return [event | {"delta": {"type": kind, name: step.text}}]
            case "ended":
                return [event]

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
            "model": self.model_name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": job.prompt_tokens - job.cached_tokens,
                "output_tokens": choice.tokens_out,
                "cache_read_input_tokens": job.cached_tokens,
                "cache_creation_input_tokens": 0,
            },
        }


_EVENTS = {"begun": "start", "grown": "delta", "ended": "stop"}


def _content(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            head = {"type": "tool_use", "id": block.id, "name": block.name}
            return head | {"input": block.arguments}
