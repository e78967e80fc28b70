"""Turns a picture or sound into the pieces that represent it in a prompt. Intake threads."""

from __future__ import annotations

import hashlib
import math
from functools import cached_property
from typing import Literal
from weakref import WeakValueDictionary

import numpy as np

from worker.engine.media.decoder import Decoder, Picture, TooLong
from worker.engine.media.span import PromptTokens
from worker.errors import InferenceFailed, InvalidRequest, QueueFull
from worker.llama.media import MediaChunk, Piece, Projector
from worker.wire.work import Medium

MOST_WAITING_TOKENS = 32_768
"""The limit of tokens of media that are decoded and wait. The pixels of one token take 9 KiB
(Qwen-VL: 28 of each side) to 37 KiB (Gemma 3: 56) of memory, as floats."""

_PERIOD = 30.0
"""Seconds after which the windows of every kind of projector for sounds repeat."""
_LEAST_SHARE = 0.9
"""A sound has at least this share of the tokens that its length and the projector's rate suggest:
some kinds round the length in steps of up to 3 s."""

_Key = tuple[str | None, Literal["image", "audio"], bytes]
"""A request's cache salt, what a medium is read as, and the medium's SHA-256."""


class Decoded(list[Piece]):
    """The pieces of a medium. Each request that has it holds them all, by its spans."""

    @property
    def parts(self) -> list[MediaChunk]:
        """Its pieces without the tokens around them."""
        return [each for each in self if isinstance(each, MediaChunk)]


class DoesNotFit(Exception):
    def __init__(self, n_tokens: int) -> None:
        """`n_tokens` is the least that the medium has."""
        super().__init__(n_tokens)
        self.n_tokens = n_tokens


class MediaReader:
    def __init__(
        self, projector: Projector, decoder: Decoder, micro_batch: int, n_cells: int
    ) -> None:
        """`n_cells`: the most tokens that the media of running requests have."""
        self._projector, self._decoder = projector, decoder
        self._micro_batch = micro_batch
        self._most_tokens = n_cells + MOST_WAITING_TOKENS
        self._decoded: WeakValueDictionary[_Key, Decoded] = WeakValueDictionary()
        """The media that requests hold."""

    def read(self, medium: Medium, prompt: PromptTokens, room: int) -> None:
        """Append a medium of at most `room` tokens to a prompt. One that another request holds, as
        the choices of a prompt do, is not decoded again. All calls come from one thread.

        Raises:
            InvalidRequest: it cannot be decoded, or the model cannot take it; names its field.
            DoesNotFit: it has more tokens. A sound that is far too long is not decoded to its end.
            QueueFull: too many media are decoded and wait.
            Cancelled: nobody waits for the prompt.
        """
        prompt.check_wanted()
        name = hashlib.sha256(medium.data).digest()
        key = (prompt.cache_salt, medium.kind, name)
        pieces = self._decoded.get(key)
        if pieces is None and not prompt.is_counted:
            self._check_queue()
        if room <= 0:
            raise DoesNotFit(1)
        if pieces is None:
            pieces = Decoded(self._pieces(medium, prompt, room))
        if (n_tokens := sum(map(_length, pieces))) > room:
            raise DoesNotFit(n_tokens)
        for part in pieces.parts:
            if part.at_once and part.n_tokens > self._micro_batch:
                raise InvalidRequest.of_field(
                    medium.field,
                    f"it has {part.n_tokens} tokens that are computed at once, and --micro-batch "
                    f"is {self._micro_batch}",
                )
        if not prompt.is_counted:
            self._decoded[key] = pieces
        prompt.add(name, pieces)

    def _check_queue(self) -> None:
        held = [pieces for each in self._decoded.valuerefs() if (pieces := each())]
        waiting = sum([part.n_tokens for pieces in held for part in pieces.parts])
        if waiting >= self._most_tokens:
            message = f"The queue is full: pictures and sounds of {waiting} tokens are decoded."
            raise QueueFull(message, retry_after_seconds=1)

    def _pieces(self, medium: Medium, prompt: PromptTokens, room: int) -> list[Piece]:
        projector = self._projector
        try:
            rate = self._least_rate if medium.kind == "audio" else 0.0
            most_seconds = max(_PERIOD, room / rate) if rate else math.inf
            decoded = self._decoder.decode(medium, projector.sample_rate, most_seconds)
            if isinstance(decoded, TooLong):
                raise DoesNotFit(math.ceil(decoded.seconds * rate))
            prompt.check_wanted()
            if isinstance(decoded, Picture):
                return projector.picture(decoded.width, decoded.height, decoded.pixels)
            return projector.sound(np.frombuffer(decoded.samples, np.float32))
        except InferenceFailed as error:
            raise InvalidRequest.of_field(medium.field, error.message) from error

    @cached_property
    def _least_rate(self) -> float:
        """The least tokens per second of a sound that takes `_PERIOD` or longer; 0 if its length
        adds none."""
        shorter, longer = map(self._silence, (1.0, 1.0 + _PERIOD))
        return _LEAST_SHARE * (longer - shorter) / _PERIOD

    def _silence(self, seconds: float) -> int:
        """The number of tokens of `seconds` of silence."""
        samples = np.zeros(int(seconds * self._projector.sample_rate), np.float32)
        return sum(map(_length, self._projector.sound(samples)))


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, tuple) else piece.n_tokens
