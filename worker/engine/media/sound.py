"""Reads sounds: WAV, with Python's own reader. Its length is known before a sample is read.

Intake threads of the engine process.
"""

from __future__ import annotations

import io
import wave

import numpy as np
import numpy.typing as npt

from worker.errors import InvalidRequest

MAX_SECONDS, _MIN_SECONDS = 1800.0, 0.1
_RATES = range(4000, 384_001)
_MAX_CHANNELS = 8

Samples = npt.NDArray[np.float32]


def decode(encoded: bytes, field: str, sample_rate: int) -> Samples:
    """A WAV's channels as one: (samples,) at `sample_rate`, from -1 to 1.

    Raises:
        InvalidRequest: it is no WAV of whole numbers, or too long or short; names `field`.
    """

    def refused(why: str) -> InvalidRequest:
        return InvalidRequest(f"{field}: {why}", field=field)

    try:
        with wave.open(io.BytesIO(encoded)) as file:
            rate, n_channels = file.getframerate(), file.getnchannels()
            width = file.getsampwidth()
            # A header may claim any number.
            n_frames = min(file.getnframes(), len(encoded) // max(n_channels * width, 1))
            if rate not in _RATES or n_channels > _MAX_CHANNELS:
                raise refused(f"the sound has {n_channels} channels at {rate} Hz, which no WAV has")
            if not _MIN_SECONDS <= n_frames / rate <= MAX_SECONDS:
                raise refused(
                    f"the sound takes {n_frames / rate:.1f} s; it may take {_MIN_SECONDS} to "
                    f"{MAX_SECONDS:.0f}"
                )
            data = file.readframes(n_frames)
    except InvalidRequest:
        raise
    except Exception:  # a damaged header raises anything
        raise refused("it is no sound that can be read: a WAV with PCM of whole numbers") from None
    values = _values(data[: len(data) // (n_channels * width) * n_channels * width], width)
    mono = values.reshape(-1, n_channels).mean(axis=1, dtype=np.float32)
    if len(mono) < _MIN_SECONDS * rate:
        raise refused("the sound is cut off")
    return _resampled(mono, rate, sample_rate)


def _values(data: bytes, width: int) -> Samples:
    """Numbers of `width` bytes as fractions of the largest."""
    if width == 1:  # without a sign
        return (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / np.float32(128)
    # In the upper bytes of 32 bits.
    padded = np.zeros((len(data) // width, 4), np.uint8)
    padded[:, 4 - width :] = np.frombuffer(data, np.uint8).reshape(-1, width)
    whole: npt.NDArray[np.int32] = padded.view("<i4")[:, 0]
    return whole.astype(np.float32) / np.float32(1 << 31)


def _resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """The mean of the samples around each new one, which also takes away what is too high for the
    new rate."""
    if rate == wanted:
        return np.ascontiguousarray(samples, np.float32)
    n_samples = len(samples)
    sums = np.concatenate([[0.0], np.cumsum(samples, dtype=np.float64)])
    step = rate / wanted
    middles = (np.arange(int(n_samples / step)) + 0.5) * step
    half = max(step, 1.0) / 2
    ends = np.arange(n_samples + 1)
    high = np.interp(middles + half, ends, sums)
    low = np.interp(middles - half, ends, sums)
    return np.asarray((high - low) / (2 * half), np.float32)
