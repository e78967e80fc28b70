"""Streams in blocks that begin, grow and end one after the other.

Anthropic's messages and OpenAI's responses have this form. The blocks are those of the choice; here
is told when each of them begins and ends. On the event loop.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from worker.api.chat.delta import Arguments, Delta, Reasoning, Text
from worker.api.chat.dialect import Answer, Body
from worker.api.chat.message import Block, Choice
from worker.api.http.encoding import sse
from worker.wire.messages import Finished, Started

Event = dict[str, Any]
What = Literal["begun", "grown", "ended"]


class BlockStep(NamedTuple):
    what: What
    at: int
    """The block's index in the answer."""
    block: Block
    text: str = ""
    """The added text."""


class BlockAnswer(Answer[Body]):
    """The answer of one choice; its dialect says what the events of its stream look like."""

    def __post_init__(self) -> None:
        [self.choice] = self.choices
        self._n_begun = 0

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        return b"".join(map(self.encoded, self._events(delta)))

    def encoded(self, event: Event) -> bytes:
        return sse(event)

    def _events(self, delta: Delta) -> Iterator[Event]:
        n_blocks = len(self.choice.blocks)
        if n_blocks > self._n_begun or isinstance(delta, Finished):
            yield from self._step("ended", self._n_begun - 1)
        if n_blocks > self._n_begun:
            self._n_begun = n_blocks
            yield from self._step("begun", n_blocks - 1)
        match delta:
            case Text(text) | Reasoning(text) | Arguments(_, text) if text:
                yield from self._step("grown", n_blocks - 1, text)
            case Started():
                yield from self.first_events()
            case Finished():
                yield from self.last_events()

    def _step(self, what: What, index: int, text: str = "") -> Iterable[Event]:
        if index < 0:
            return ()
        return self.step_events(BlockStep(what, index, self.choice.blocks[index], text))

    @abstractmethod
    def first_events(self) -> Iterable[Event]: ...

    @abstractmethod
    def step_events(self, step: BlockStep) -> Iterable[Event]: ...

    @abstractmethod
    def last_events(self) -> Iterable[Event]: ...
