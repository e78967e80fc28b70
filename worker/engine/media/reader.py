"""Turns a picture or sound into what stands for it in a prompt. Intake threads."""

from __future__ import annotations

from weakref import WeakSet

import numpy as np

from worker.engine.media.decoding import Decoder, Picture
from worker.engine.media.span import PromptTokens, Span, ids_of, key_of
from worker.errors import InferenceFailed, InvalidRequest, QueueFull
from worker.llama.media import MediaChunk, Piece, Projector
from worker.wire.work import Medium

MOST_WAITING_TOKENS = 32_768
"""Of media that are decoded and wait. The pixels of one take 9 KiB (Qwen-VL: 28 of each side) to
37 KiB (Gemma 3: 56) of memory, as floats."""


class MediaReader:
    def __init__(
        self, projector: Projector, decoder: Decoder, micro_batch: int, n_cells: int
    ) -> None:
        """`n_cells`: what the media of running requests have at most."""
        self._projector, self._decoder = projector, decoder
        self._micro_batch = micro_batch
        self._most_tokens = n_cells + MOST_WAITING_TOKENS
        self._decoded: WeakSet[MediaChunk] = WeakSet()
        """What requests hold. They come from one thread, so nothing is added in an iteration."""

    def read(self, medium: Medium, prompt: PromptTokens) -> None:
        """Append a medium to a prompt.

        Raises:
            InvalidRequest: it cannot be decoded, or the model cannot take it; names its field.
            QueueFull: too many media are decoded and wait.
        """
        if (waiting := sum([each.n_tokens for each in self._decoded])) >= self._most_tokens:
            message = f"The queue is full: pictures and sounds of {waiting} tokens are decoded."
            raise QueueFull(message, retry_after_seconds=1)
        part = 0
        for piece in self._pieces(medium):
            if isinstance(piece, tuple):
                prompt.ids += piece
                continue
            if piece.at_once and piece.n_tokens > self._micro_batch:
                raise InvalidRequest(
                    f"{medium.field}: it has {piece.n_tokens} tokens that are computed at once, "
                    f"and --micro-batch is {self._micro_batch}",
                    field=medium.field,
                )
            self._decoded.add(piece)
            key = key_of(medium.data, part)
            prompt.spans.append(Span(len(prompt.ids), piece, key))
            prompt.ids += ids_of(key, piece)
            part += 1

    def _pieces(self, medium: Medium) -> list[Piece]:
        projector, field = self._projector, medium.field
        decoded = self._decoder.decode(medium, projector.sample_rate)
        try:
            if isinstance(decoded, Picture):
                return projector.picture(decoded.width, decoded.height, decoded.pixels)
            return projector.sound(np.frombuffer(decoded.samples, np.float32))
        except InferenceFailed as error:
            raise InvalidRequest(f"{field}: {error.message}", field=field) from error
