"""Turns a picture or sound into what stands for it in a prompt. Intake threads."""

from __future__ import annotations

import numpy as np

from worker.engine.media.decoding import Decoder, Picture
from worker.engine.media.span import PromptTokens, Span, ids_of, key_of
from worker.errors import InferenceFailed, InvalidRequest
from worker.llama.media import Piece, Projector
from worker.wire.work import Medium


class MediaReader:
    def __init__(self, projector: Projector, decoder: Decoder, micro_batch: int) -> None:
        self._projector, self._decoder = projector, decoder
        self._micro_batch = micro_batch

    def read(self, medium: Medium, prompt: PromptTokens) -> None:
        """Append a medium to a prompt.

        Raises:
            InvalidRequest: it cannot be decoded, or the model cannot take it; names its field.
        """
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
