"""Converts the bytes of tokens to text, in whole characters only."""

from __future__ import annotations

import codecs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental UTF-8.

    A character whose bytes are in several tokens is held back until its last byte has come. The
    joined texts equal a single decode of all bytes; invalid bytes become U+FFFD as they would
    there.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder("replace")

    def feed(self, piece: bytes) -> str:
        """The characters that `piece` completes."""
        if piece.isascii() and not self._decoder.buffer:  # the usual case needs no state
            return piece.decode("ascii")
        return self._decoder.decode(piece)

    @property
    def holds(self) -> bool:
        """Whether an incomplete character is held back."""
        return bool(self._decoder.buffer)

    def finish(self) -> str:
        """The rest at the end of the stream: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", True)
