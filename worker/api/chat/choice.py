"""One choice of an answer: the message that its deltas add up to. On the event loop.

Streamed and whole answers come from the same deltas: a dialect streams each of them, or reads the
sum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import pydantic_core

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.parse.parser import AnswerParser
from worker.api.chat.parse.readable import Readable
from worker.api.chat.request import INPUT
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import (
    Failed,
    Finished,
    PromptProgress,
    PromptScored,
    Started,
    Token,
    TokenLogprob,
)

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(slots=True)
class Block:
    """Neighbouring deltas of one kind, or one call."""

    kind: Literal["reasoning", "text", "call", "custom"]
    """`custom` is the call of a custom tool."""
    id: str = ""
    """The id of a call."""
    name: str = ""
    """The name of a call's function."""
    parts: list[str] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of a text block's own tokens, if the request asks for them."""

    @property
    def is_call(self) -> bool:
        return self.kind in ("call", "custom")

    @property
    def text(self) -> str:
        """The text so far; for a call, its arguments."""
        return "".join(self.parts)

    @property
    def arguments(self) -> dict[str, Any]:
        """A call's arguments as an object. If they were cut off, it has what arrived, a last string
        in part. A custom tool's text is the member `INPUT`; so are arguments that are not JSON,
        beside the members before the mistake."""
        if self.kind != "custom":
            read, text, readable = pydantic_core.from_json, self.text or "{}", Readable()
            for _ in range(2):
                try:
                    return dict(read(text))
                except ValueError as error:
                    if "EOF" in str(error):
                        return dict(read(text, allow_partial="trailing-strings"))
                    text = readable.take(text) + readable.finish()
        return {INPUT: self.text}


@dataclass(slots=True, eq=False)
class Choice:
    """One choice while it grows: `read` turns an event into deltas, `add` accumulates a delta."""

    index: int
    job: Job
    parser_of: Callable[[str], AnswerParser] | None = None
    """Makes the answer's parser from the end of its prompt; `None`: the text is not parsed."""
    echo: str = ""
    """The prompt's text, if the answer begins with it."""
    blocks: list[Block] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of all tokens, marks, reasoning and calls included, that were not sent yet."""
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    progress: PromptProgress | None = None
    """The latest report, if the request asks for progress."""
    finished: Finished | None = None
    reasoning_tokens: int = 0
    """Tokens of the reasoning, its end mark included."""
    _n_read: int = 0
    """Tokens of the answer so far."""
    _undecided: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of tokens whose text is withheld, as it may begin a mark."""
    _parser: AnswerParser | None = None

    def read(self, event: StreamEvent) -> list[Delta]:
        """The deltas of an event, in order.

        Raises:
            WorkerError: the job failed.
        """
        match event:
            case Token(_, text, ids, logprobs):
                self._n_read += len(ids)
                if self._parser is None:
                    return [Text(text, logprobs, ids)]
                parts, deltas = [(text, len(ids))], list[Delta]()
                if event.begins:  # reasoning may end with any of the tokens
                    ends = (*event.begins[1:], len(text))
                    parts = [(text[: event.begins[0]], 0)]
                    parts += [(text[i:k], 1) for i, k in zip(event.begins, ends, strict=True)]
                for part, n_tokens in parts:
                    was_reasoning = self._parser.is_reasoning
                    new = self._parser.feed(part)
                    is_reasoning = was_reasoning or self._parser.is_reasoning
                    if is_reasoning or any(isinstance(delta, Reasoning) for delta in new):
                        self.reasoning_tokens += n_tokens
                    deltas += new
                return _scored(deltas, logprobs) if logprobs else deltas
            case Finished(_, reason, logprobs=logprobs):
                parser = self._parser
                deltas = parser.finish(is_cut=reason != "EOS") if parser is not None else []
                return [*(_scored(deltas, logprobs) if logprobs else deltas), event]
            case Started(prompt_end=prompt_end):
                if self.parser_of is not None:
                    self._parser = self.parser_of(prompt_end)
                return [event]
            case PromptScored() | PromptProgress():
                return [event]
        assert isinstance(event, Failed), "a generation has no other events"
        raise event.error

    def add(self, delta: Delta) -> None:
        match delta:
            case Text(text) | Reasoning(text) if text:
                kind: Literal["reasoning", "text"]
                kind = "text" if isinstance(delta, Text) else "reasoning"
                if not self.blocks or self.blocks[-1].kind != kind:
                    self.blocks.append(Block(kind))
                self.blocks[-1].parts.append(text)
            case Call(_, id, name, is_custom):
                self.blocks.append(Block("custom" if is_custom else "call", id, name))
            case Arguments(_, text):
                self.blocks[-1].parts.append(text)
            case PromptScored(_, logprobs):
                self.prompt_logprobs = logprobs
            case PromptProgress():  # also between two tokens, after a preemption
                self.progress = delta
                return
            case Finished():
                self.finished = delta
        if not isinstance(delta, Text):
            self._undecided.clear()
            return
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.logprobs or self._undecided:
            self._assign_scores(delta)

    def _assign_scores(self, delta: Text) -> None:
        """Add log-probabilities to the text block that their tokens wrote. Those of marks,
        reasoning, calls and the end belong to no block."""
        self._undecided += delta.logprobs
        if delta.text:
            first, end = _span(delta.text.encode(), self._undecided)
            self.blocks[-1].scores += self._undecided[first:end]
            del self._undecided[:end]

    def forget_scores(self) -> None:
        """Free those that were sent, the answer's one by one: many at once would block others."""
        self.prompt_logprobs = ()
        for sent in (self.logprobs, *(block.scores for block in self.blocks)):
            while sent:
                sent.pop()

    @property
    def text(self) -> str:
        """The answer's text without reasoning, calls and echo."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.is_call]

    @property
    def tokens_out(self) -> int:
        """Tokens of the answer as far as it was read; its job may have received more."""
        return self.finished.tokens_out if self.finished is not None else self._n_read

    @property
    def finish_reason(self) -> FinishReason:
        assert self.finished is not None
        if self.finished.stop_reason == "MAX_TOKENS":
            return "length"
        # A client that reads `tool_calls` runs all calls, even one whose arguments were cut off.
        return "tool_calls" if self.calls and not self.is_cut else "stop"

    @property
    def is_cut(self) -> bool:
        """Whether a limit or a stop ended the answer within its last call."""
        assert self.finished is not None
        is_in_call = self._parser is not None and self._parser.is_in_call
        return is_in_call and self.finished.stop_reason != "EOS"


def _span(shown: bytes, scores: Sequence[TokenLogprob]) -> tuple[int, int]:
    """The first of the tokens that wrote a text, and their end: a mark may be before them, and text
    that is still withheld behind them."""
    ends = [0, *accumulate(len(each.piece) for each in scores)]
    joined = b"".join(each.piece for each in scores)
    at = joined.find(shown)
    if at == 0 or (at > 0 and not joined.endswith(shown)):
        return bisect_right(ends, at) - 1, bisect_left(ends, at + len(shown))
    return bisect_left(ends, True, key=lambda at: joined[at:] in shown), len(scores)


def _scored(deltas: list[Delta], logprobs: tuple[TokenLogprob, ...]) -> list[Delta]:
    """The deltas of one event, its log-probabilities with the first text, or with an empty one."""
    for index, delta in enumerate(deltas):
        if isinstance(delta, Text):
            return [*deltas[:index], Text(delta.text, logprobs), *deltas[index + 1 :]]
    return [Text("", logprobs), *deltas]
