"""Decodes sounds: WAV, FLAC and MP3, a second at a time, so that none exceeds its limit.

Runs only in the decoder's process: decoders are native code, and the bytes are untrusted.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from worker.engine.media.decoder import Sound, TooLong
from worker.errors import InvalidRequest

MAX_SECONDS, _MIN_SECONDS = 1800.0, 0.1
FORMATS = ("WAV", "FLAC", "MP3")
_NOT_READABLE = f"it is not a readable sound: {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
_BEGINNING = re.compile(rb"RIFF....WAVE|fLaC|ID3|\xff[\xe0-\xff]", re.DOTALL)
"""How files of these formats begin; libsndfile reads others, too."""
_LOUDEST = 1e6
"""Full scale is 1; decoders give more for a loud sound, and anything for a damaged one."""
_RATES = range(4000, 384_001)
_MAX_CHANNELS = 8
_UNKNOWN = 2**63 - 1
"""libsndfile's length of a sound whose header has none."""

_HEADER_BYTES = 64 * 1024
"""A WAV's length is checked only if its samples begin within this many bytes."""
_MOST = b"\xff" * 4

_MOST_LONGER = 64
"""How many times its length an MP3 may take at its other bit rates, from 320 to 8 kbit/s."""

Samples = npt.NDArray[np.float32]


class _Stream(soundfile.SoundFile):  # type: ignore[misc]
    """A file that is only read forwards. soundfile seeks to its position after each read, which
    fails at the end of a FLAC without a length in its header, as encoders write it into a pipe."""

    def seekable(self) -> bool:
        return False


class _EndIsFar(io.BytesIO):
    """An MP3 that reports more bytes than it has. Without a tag, libsndfile estimates its length
    from its bytes and first bit rate, and reads no further, though the rest may take longer."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__(encoded)
        self._size = len(encoded)
        self._from_end = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._from_end = 0
        if whence == io.SEEK_END:
            offset, self._from_end = self._size, offset + (_MOST_LONGER - 1) * self._size
            whence = io.SEEK_SET
        super().seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return super().tell() + self._from_end

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, with zeros where the file ends, as its last frame may be cut off; after
        the end, read nothing."""
        n_read = super().readinto(buffer)
        if not n_read and not self._from_end:
            return 0
        buffer[n_read:] = bytes(len(buffer) - n_read)
        return len(buffer)


def decode(encoded: bytes, sample_rate: int, most_seconds: float = MAX_SECONDS) -> Sound | TooLong:
    """A sound, mixed to one channel at `sample_rate`. One of more than `most_seconds` is decoded no
    further than it takes to know that.

    Raises:
        InvalidRequest: it is not a readable sound, or too long or short.
    """
    with _opened(encoded) as file:
        rate = file.samplerate
        # Without a tag, an MP3's length is an estimate.
        if file.frames != _UNKNOWN and file.format != "MP3":
            _check_seconds(file.frames / rate)
            if file.frames > most_seconds * rate:
                return TooLong(file.frames / rate)
        seconds: list[Samples] = []
        n_frames = 0
        for frames in _seconds_of(file):
            n_frames += len(frames)
            _check_seconds(max(n_frames / rate, _MIN_SECONDS))  # a header may be wrong
            if n_frames > most_seconds * rate:
                return TooLong(n_frames / rate)
            if not abs(frames).max() <= _LOUDEST:  # False for NaN.
                raise InvalidRequest(
                    f"the sound is damaged: it is over {_LOUDEST:.0f} times as loud as full "
                    "scale, or has samples that are not numbers"
                )
            seconds.append(_resampled(frames.mean(axis=1), rate, sample_rate))
    _check_seconds(n_frames / rate)
    return Sound(np.concatenate(seconds).tobytes())


def _opened(encoded: bytes) -> _Stream:
    """The file, of which only the header was read."""
    if not _BEGINNING.match(encoded):
        raise InvalidRequest(_NOT_READABLE)
    encoded = _with_length(encoded)
    try:
        file = _Stream(io.BytesIO(encoded))
        if file.format == "MP3":
            file = _Stream(_EndIsFar(encoded))
    except Exception:  # a damaged header raises anything
        raise InvalidRequest(_NOT_READABLE) from None
    rate, n_channels = file.samplerate, file.channels
    if rate not in _RATES or n_channels > _MAX_CHANNELS:
        raise InvalidRequest(f"the sound has {n_channels} channels at {rate} Hz: not supported")
    return file


def _seconds_of(file: _Stream) -> Iterator[Samples]:
    """A second at a time: (frames, channels)."""
    try:
        while len(frames := file.read(file.samplerate, dtype="float32", always_2d=True)):
            yield frames
    except soundfile.LibsndfileError:
        raise InvalidRequest(f"the {file.format} sound is damaged") from None


def _with_length(encoded: bytes) -> bytes:
    """The sound; a WAV's length of 0, as written into a pipe, is replaced by the largest one."""
    at = 12 if encoded.startswith(b"RIFF") else len(encoded)
    while at < min(len(encoded), _HEADER_BYTES):
        name, size = encoded[at : at + 4], encoded[at + 4 : at + 8]
        if name == b"data":
            return encoded[: at + 4] + _MOST + encoded[at + 8 :] if size == bytes(4) else encoded
        n_bytes = int.from_bytes(size, "little")
        at += 8 + n_bytes + n_bytes % 2
    return encoded


def _check_seconds(seconds: float) -> None:
    if not _MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"the sound takes {seconds:.10g} s; it may take {_MIN_SECONDS} to {MAX_SECONDS:.0f}"
        )


def _resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Resample by the mean of the samples around each new one, which also removes frequencies that
    are too high for the new rate."""
    if rate == wanted:
        return samples
    n_samples = len(samples)
    sums = np.concatenate([[0.0], np.cumsum(samples, dtype=np.float64)])
    step = rate / wanted
    middles = (np.arange(n_samples * wanted // rate) + 0.5) * step
    half = max(step, 1.0) / 2
    low, high = ((middles + offset).clip(0, n_samples) for offset in (-half, half))
    ends = np.arange(n_samples + 1)
    means = (np.interp(high, ends, sums) - np.interp(low, ends, sums)) / (high - low)
    return np.asarray(means, np.float32)
