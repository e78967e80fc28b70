"""The client of the process that decodes pictures and sounds (`decoder_child`). Intake threads."""

from __future__ import annotations

from functools import cache

import msgspec
from msgspec import Struct

from worker.confinement.bounded import BoundedProgram, Ended
from worker.errors import InvalidRequest
from worker.wire.work import Medium

_SECONDS = 20.0
"""The limit of processor time for a medium. The largest picture takes one or two."""


class Encoded(Struct, frozen=True):
    medium: Medium
    sample_rate: int
    """The wanted rate of a sound, in samples per second."""
    most_seconds: float
    """A longer sound is decoded no further than it takes to know that."""


class Picture(Struct, frozen=True, tag=True):
    width: int
    height: int
    pixels: bytes
    """Red, green and blue of each pixel, row by row."""


class Sound(Struct, frozen=True, tag=True):
    samples: bytes
    """32-bit floats from -1 to 1."""


class TooLong(Struct, frozen=True, tag=True):
    """A sound that is longer than `most_seconds`."""

    seconds: float
    """Its length, at least."""


class Refusal(Struct, frozen=True, tag=True):
    why: str


_read_answer = msgspec.msgpack.Decoder(Picture | Sound | TooLong | Refusal).decode


class Decoder(BoundedProgram):
    def __init__(self) -> None:
        # Decoders write each fault of a file to standard error, and a client's file may have many.
        super().__init__("worker.engine.media.decoder_child", is_quiet=True)

    def decode(
        self, medium: Medium, sample_rate: int, most_seconds: float
    ) -> Picture | Sound | TooLong:
        """`sample_rate` and `most_seconds` are for a sound.

        Raises:
            InvalidRequest: the medium cannot be read, or is too large; names its field.
        """
        answer: Picture | Sound | TooLong | Refusal
        try:
            encoded = msgspec.msgpack.encode(Encoded(medium, sample_rate, most_seconds))
            answer = _read_answer(self.ask(encoded, _SECONDS))
        except Ended as error:
            late = error.why == "time"
            answer = Refusal("it takes too long to decode" if late else "it cannot be decoded")
        if isinstance(answer, Refusal):
            raise InvalidRequest.of_field(medium.field, answer.why)
        return answer


decoder = cache(Decoder)
"""The decoder of this process, started at the first call."""
