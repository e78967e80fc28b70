"""Ollama's answers: JSON lines, or their content as one object."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from worker.api.chat.answer import Answer, Body
from worker.api.chat.choice import Block, Choice
from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.scored import scored_tokens
from worker.api.dialects.ollama.naming import LINES, nanoseconds, now, tagged
from worker.api.http.encoding import json_line
from worker.api.http.operation import NDJSON
from worker.wire.messages import Finished

Line = dict[str, Any]


class _Lines(Answer[Body]):
    """What chats and plain completions have in common."""

    media_type = NDJSON
    form = LINES

    def __post_init__(self) -> None:
        [self._choice] = self.choices
        self._model = tagged(self.state.name_of(self.asked.model))
        self._n_calls = 0
        """Number of calls sent. A call is one line, so it is sent once it is complete."""

    @abstractmethod
    def content(self, text: str, thinking: str = "", calls: Sequence[Block] = ()) -> Line:
        """The fields of a line that hold a part of the answer, or the whole answer."""

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        match delta:
            case Arguments():
                return b""
            case Call():
                return self._calls(choice.calls[:-1])
            case Text(text, logprobs) if text or logprobs:
                scored = {"logprobs": scored_tokens(logprobs)} if logprobs else {}
                # Text ends a call; a delta with scores alone may be in the middle of one.
                ended = self._calls(choice.calls) if text else b""
                return ended + self._line(self.content(text) | scored)
            case Reasoning(text):
                return self._calls(choice.calls) + self._line(self.content("", text))
            case Finished():
                calls = self._calls(self._whole_calls())
                return calls + self._line(self.content("") | self._end())
            case _:
                return b""

    def whole(self) -> Line:
        choice = self._choice
        content = self.content(choice.text, choice.reasoning, self._whole_calls())
        scored = {"logprobs": scored_tokens(choice.logprobs)} if choice.logprobs else {}
        return self._head() | content | scored | self._end()

    def _whole_calls(self) -> Sequence[Block]:
        """All calls but one that was cut off: as an object, its arguments would look complete."""
        calls = self._choice.calls
        return calls[:-1] if self._choice.is_cut else calls

    def _calls(self, calls: Sequence[Block]) -> bytes:
        """A line for each of these calls that was not sent yet."""
        new, self._n_calls = calls[self._n_calls :], len(calls)
        return b"".join(self._line(self.content("", calls=[call])) for call in new)

    def _line(self, fields: Line) -> bytes:
        return json_line(self._head() | fields)

    def _head(self) -> Line:
        return {"model": self._model, "created_at": now(), "done": False}

    def _end(self) -> Line:
        choice, finished = self._choice, self._choice.finished
        assert finished is not None
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(choice.job.age_seconds),
            "load_duration": nanoseconds(choice.job.held_seconds),
            "prompt_eval_count": choice.job.prompt_tokens,
            "prompt_eval_duration": nanoseconds(finished.prompt_time_ms / 1000),
            "eval_count": choice.tokens_out,
            "eval_duration": nanoseconds(finished.decode_time_ms / 1000),
        }


class ChatAnswer(_Lines[Body]):
    """The answer of `/api/chat`."""

    def content(self, text: str, thinking: str = "", calls: Sequence[Block] = ()) -> Line:
        message: Line = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call(self._choice.calls.index(call), call) for call in calls]
        return {"message": message}


class GenerateAnswer(_Lines[Body]):
    """The answer of `/api/generate`, which has no tools and so no calls."""

    def content(self, text: str, thinking: str = "", calls: Sequence[Block] = ()) -> Line:
        return {"response": text} | ({"thinking": thinking} if thinking else {})


def _call(index: int, call: Block) -> Line:
    function = {"index": index, "name": call.name, "arguments": call.arguments}
    return {"id": call.id, "function": function}
