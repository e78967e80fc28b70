"""Decodes pictures and sounds in processes that the kernel bounds (`confinement.bounded`).

A medium is untrusted, and decoders are native code. One that does not end, needs too much memory or
crashes fails only its own request.
"""

from __future__ import annotations

import io

import msgspec
import numpy as np
import soundfile
from PIL import Image

from worker.confinement.bounded import serve
from worker.engine.media import picture, sound
from worker.engine.media.decoder import Encoded, Picture, Refusal, Sound, TooLong
from worker.errors import InvalidRequest

MAX_BYTES = 2**30
"""The limit of the memory that a medium takes: several times the pixels of the largest picture."""


def main() -> None:
    _warm_up()
    serve(_answer, MAX_BYTES)


def _answer(request: bytes) -> bytes:
    return msgspec.msgpack.encode(_decoded(msgspec.msgpack.decode(request, type=Encoded)))


def _decoded(encoded: Encoded) -> Picture | Sound | TooLong | Refusal:
    data = encoded.medium.data
    try:
        if encoded.medium.kind == "image":
            return picture.decode(data)
        return sound.decode(data, encoded.sample_rate, encoded.most_seconds)
    except InvalidRequest as error:
        return Refusal(error.message)


def _warm_up() -> None:
    """Make the libraries open the files that they open at the first medium."""
    Image.init()
    for form in picture.FORMATS:
        Image.new("RGB", (8, 8)).save(file := io.BytesIO(), form)
        picture.decode(file.getvalue())
    for form in sound.FORMATS:
        soundfile.write(file := io.BytesIO(), np.zeros(8000), 16_000, format=form)
        sound.decode(file.getvalue(), 8000)


if __name__ == "__main__":
    main()
