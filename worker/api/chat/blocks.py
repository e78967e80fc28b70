"""Answers that consist of blocks, which begin, grow and end one after the other.

Anthropic's messages and OpenAI's responses have this form.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.output import Output
from worker.api.chat.run import Answer
from worker.api.http.encoding import sse
from worker.supervisor.job import StreamEvent
from worker.wire.messages import Finished, Started

Kind = Literal["reasoning", "text", "call"]
Event = dict[str, Any]


@dataclass(slots=True)
class OutputBlock:
    index: int
    kind: Kind
    text: str = ""
    """The text so far; the arguments, if the block is a call."""
    id: str = ""
    name: str = ""


class BlockStep(NamedTuple):
    what: Literal["begun", "grown", "ended"]
    block: OutputBlock
    text: str = ""
    """The added text."""


class BlockAnswer(Answer):
    """One answer in blocks, whole or streamed; its dialect says what its events look like."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._blocks: list[OutputBlock] = []
        self._open: OutputBlock | None = None

    def take(self, index: int, event: StreamEvent) -> None:
        for _ in self._steps(self._output.take(event)):
            pass

    def parts(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        return map(self._encoded, self._events(event))

    def _events(self, event: StreamEvent) -> Iterator[Event]:
        pieces = self._output.take(event)
        if isinstance(event, Started):
            yield from self._first_events()
        for step in self._steps(pieces):
            yield from self._step_events(step)
        if isinstance(event, Finished):
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

    def _steps(self, pieces: Iterable[Delta]) -> Iterator[BlockStep]:
        for piece in pieces:
            match piece:
                case Call(_, id, name):
                    yield from self._begin("call", id, name)
                case Arguments(_, text):
                    assert self._open is not None
                    yield self._grow(self._open, text)
                case Reasoning(text) | Text(text):
                    kind: Kind = "text" if isinstance(piece, Text) else "reasoning"
                    if not text or (self._open is None and not text.strip()):
                        continue
                    if self._open is None or self._open.kind != kind:
                        yield from self._begin(kind)
                    assert self._open is not None
                    yield self._grow(self._open, text)

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> Iterator[BlockStep]:
        yield from self._end()
        self._open = OutputBlock(len(self._blocks), kind, id=id, name=name)
        self._blocks.append(self._open)
        yield BlockStep("begun", self._open)

    def _grow(self, block: OutputBlock, text: str) -> BlockStep:
        block.text += text
        return BlockStep("grown", block, text)

    def _end(self) -> Iterator[BlockStep]:
        if self._open is not None:
            yield BlockStep("ended", self._open)
            self._open = None
