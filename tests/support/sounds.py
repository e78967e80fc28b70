"""Sounds for tests of requests and of the decoder."""

from __future__ import annotations

import io

import numpy as np
import soundfile


def silence(seconds: int, rate: int = 4000, form: str = "FLAC") -> bytes:
    """Return silence, which is small as a FLAC, however long it is."""
    soundfile.write(file := io.BytesIO(), np.zeros(rate * seconds, np.int16), rate, format=form)
    return file.getvalue()


def without_length(flac: bytes) -> bytes:
    """A FLAC whose header does not state its length, as encoders write it into a pipe."""
    return flac[:21] + bytes([flac[21] & 0xF0, *bytes(4)]) + flac[26:]
