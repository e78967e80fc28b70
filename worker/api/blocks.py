"""A choice's pieces as blocks, which begin, grow and end one after the other.

Anthropic's messages and OpenAI's responses have this form. Pure state, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from worker.api.output import CallArguments, CallBegun, OutputPiece, Reasoning, Text

Kind = Literal["reasoning", "text", "call"]


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


class Blocks:
    def __init__(self) -> None:
        self.all: list[OutputBlock] = []
        self._open: OutputBlock | None = None

    def take(self, pieces: Iterable[OutputPiece]) -> Iterator[BlockStep]:
        for piece in pieces:
            match piece:
                case CallBegun(_, id, name):
                    yield from self._begin("call", id, name)
                case CallArguments(_, text):
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

    def finish(self) -> Iterator[BlockStep]:
        if self._open is not None:
            yield BlockStep("ended", self._open)
            self._open = None

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> Iterator[BlockStep]:
        yield from self.finish()
        self._open = OutputBlock(len(self.all), kind, id=id, name=name)
        self.all.append(self._open)
        yield BlockStep("begun", self._open)

    def _grow(self, block: OutputBlock, text: str) -> BlockStep:
        block.text += text
        return BlockStep("grown", block, text)
