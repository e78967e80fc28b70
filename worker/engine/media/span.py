"""Where a sequence has embeddings in place of tokens. Plain Python."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from worker.llama.media import MediaChunk, Piece

_STILL = 1 << 30


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive positions of a prompt that hold one part of a picture or sound.

    The sequence's tokens have ids below zero there, which no vocabulary has. They are derived from
    the medium's bytes: equal ids at equal places are the same part of the same medium, which is all
    that the cache needs of tokens.
    """

    start: int
    chunk: MediaChunk
    key: bytes
    """The part's name, which begins with the medium's SHA-256."""
    medium: object = field(default=None, compare=False)
    """All pieces of the medium, which live as long as a request holds a part."""

    @property
    def n_tokens(self) -> int:
        return self.chunk.n_tokens

    @property
    def end(self) -> int:
        return self.start + self.n_tokens

    @property
    def n_still(self) -> int:
        """Its tokens that do not advance the position of what follows (M-RoPE)."""
        return self.chunk.n_tokens - self.chunk.n_positions


def always_wanted() -> None:
    """The `check_wanted` of a prompt that cannot be cancelled."""


@dataclass(slots=True)
class PromptTokens:
    """A prompt's token ids, and the spans of them that stand for embeddings."""

    is_counted: bool = False
    """Whether only its length is wanted: then it holds no media."""
    check_wanted: Callable[[], None] = always_wanted
    """Raises an error if nobody waits for the prompt any more."""
    cache_salt: str | None = None
    """Media that requests of this salt hold are not decoded again."""
    ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, name: bytes, pieces: Sequence[Piece]) -> None:
        """Append all pieces of the medium with this SHA-256."""
        parts = count()
        for piece in pieces:
            if isinstance(piece, tuple):
                self.ids += piece
                continue
            key = key_of(name, next(parts))
            if not self.is_counted:
                self.spans.append(Span(len(self.ids), piece, key, pieces))
            self.ids += ids_of(key, piece)


def key_of(name: bytes, part: int) -> bytes:
    """The name of part number `part` of a medium with this SHA-256."""
    return name + part.to_bytes(4, "big")


def ids_of(key: bytes, chunk: MediaChunk) -> list[int]:
    """The ids of a part: 30 bits of a hash each, and one for those that keep the position."""
    n_tokens, n_positions = chunk.n_tokens, chunk.n_positions
    ids = array("i", hashlib.shake_256(key).digest(4 * n_tokens))
    moving = [each & ~_STILL | -(1 << 31) for each in ids[:n_positions]]
    return moving + [each | _STILL | -(1 << 31) for each in ids[n_positions:]]


def position_of(tokens: list[int], length: int) -> int:
    """The position of the token that follows the first `length`."""
    return length - sum([token < 0 and token & _STILL != 0 for token in tokens[:length]])
