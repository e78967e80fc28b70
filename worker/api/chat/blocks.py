"""Answers that consist of blocks, which begin, grow and end one after the other.

Anthropic's messages and OpenAI's responses have this form. The blocks are those of the choice, but
one of white space alone is not shown; one that begins with white space begins with all of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.dialect import Answer, Body
from worker.api.chat.message import Block, Choice
from worker.api.chat.request import Generate
from worker.api.http.encoding import sse
from worker.api.http.state import AppState
from worker.wire.messages import Finished, Started

Event = dict[str, Any]


class BlockStep(NamedTuple):
    what: Literal["begun", "grown", "ended"]
    number: int
    """Of the block among those that are shown."""
    block: Block
    """Empty where it has begun."""
    text: str = ""
    """The added text."""


class BlockAnswer(Answer[Body]):
    """An answer of one choice in blocks; its dialect says what its events look like."""

    def __init__(
        self, body: Body, asked: Generate, choices: Sequence[Choice], state: AppState
    ) -> None:
        super().__init__(body, asked, choices, state)
        self.choice = choices[0]
        self._open: Block | None = None
        self._n_begun = 0

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        return b"".join(map(self._encoded, self._events(delta)))

    def _events(self, delta: Delta) -> Iterator[Event]:
        match delta:
            case Started():
                yield from self._first_events()
            case Text() | Reasoning() | Call() | Arguments():
                for step in self._steps(delta):
                    yield from self._step_events(step)
            case Finished():
                for step in self._end():
                    yield from self._step_events(step)
                yield from self._last_events()

    def _encoded(self, event: Event) -> bytes:
        return sse(event)

    @abstractmethod
    def _first_events(self) -> Iterable[Event]: ...

    @abstractmethod
    def _step_events(self, step: BlockStep) -> Iterable[Event]: ...

    @abstractmethod
    def _last_events(self) -> Iterable[Event]: ...

    # --- the blocks ------------------------------------------------------------------------

    def _blocks(self) -> list[Block]:
        return [block for block in self.choice.blocks if _is_shown(block)]

    def _steps(self, delta: Text | Reasoning | Call | Arguments) -> Iterator[BlockStep]:
        """What a delta does to the blocks; the choice has it already, in its last block."""
        block = self.choice.blocks[-1] if self.choice.blocks else None
        if block is None:
            return
        if block is self._open:
            text = "" if isinstance(delta, Call) else delta.text
        elif _is_shown(block):
            yield from self._end()
            self._open, text = block, block.text
            yield BlockStep("begun", self._n_begun, Block(block.kind, block.id, block.name))
            self._n_begun += 1
        else:
            return
        if text:
            yield BlockStep("grown", self._n_begun - 1, block, text)

    def _end(self) -> Iterator[BlockStep]:
        if self._open is not None:
            yield BlockStep("ended", self._n_begun - 1, self._open)
            self._open = None


def _is_shown(block: Block) -> bool:
    return block.kind == "call" or not block.text.isspace()
