"""Bytes of tokens to text, whole characters only."""

from __future__ import annotations

import codecs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental UTF-8: a character whose bytes are spread over several tokens is held back
    until its last byte is there. The pieces' texts put together equal the one-shot decode of all
    bytes; bytes that are no UTF-8 become U+FFFD as they do there.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder("replace")

    def feed(self, piece: bytes) -> str:
        """The characters that `piece` completes."""
        if piece.isascii() and not self._decoder.buffer:  # most are, and need no state
            return piece.decode("ascii")
        return self._decoder.decode(piece)

    @property
    def holds(self) -> bool:
        """The beginning of a character waits for its end."""
        return bool(self._decoder.buffer)

    def finish(self) -> str:
        """What is left at the end of the stream: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", True)
