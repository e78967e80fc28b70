"""Sounds of each format, decoded to samples."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from tests.support.sounds import silence, without_length
from worker.engine.media import sound as sounds
from worker.engine.media.decoder import Sound, TooLong


def test_no_more_of_a_long_sound_is_decoded_than_it_takes() -> None:
    whole = silence(1000)
    for encoded, known in ((whole, 1000.0), (without_length(whole), 101.0)):
        assert sounds.decode(encoded, 16_000, 100.0) == TooLong(known)
        assert isinstance(sounds.decode(encoded, 16_000, 1000.0), Sound)


def test_the_length_of_an_mp3_is_measured_not_estimated() -> None:
    """It begins with another bit rate than the rest, and no tag states its length."""
    whole = b""
    for seconds, level in ((2, 0.95), (40, 0.05)):
        file, noise = io.BytesIO(), np.random.default_rng(0).uniform(-0.5, 0.5, seconds * 44_100)
        soundfile.write(
            file, noise, 44_100, format="MP3", compression_level=level, bitrate_mode="CONSTANT"
        )
        whole += file.getvalue()
    assert soundfile.SoundFile(io.BytesIO(whole)).frames > 200 * 44_100
    assert isinstance(sounds.decode(whole, 16_000, 60.0), Sound)


def test_an_mp3_without_a_tag_is_heard_to_its_end() -> None:
    """Its length is estimated from the first bit rate, which may be above all others."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 10 * 44_100)
    soundfile.write(file := io.BytesIO(), noise, 44_100, format="MP3", bitrate_mode="VARIABLE")
    tagged = file.getvalue()
    frames = tagged[tagged.index(tagged[:2], tagged.index(b"Xing")) :]
    assert soundfile.SoundFile(io.BytesIO(frames)).frames < 5 * 44_100
    for encoded in (tagged, frames, *(frames[:-n_cut] for n_cut in (1, 100, 1000))):
        heard = sounds.decode(encoded, 16_000, 60.0)
        assert isinstance(heard, Sound) and 9.9 < len(heard.samples) / 4 / 16_000 < 10.1


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100])
@pytest.mark.parametrize(
    ("form", "subtype"),
    [
        *(("WAV", each) for each in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "ULAW")),
        *(("FLAC", each) for each in ("PCM_16", "PCM_24")),
        ("MP3", "MPEG_LAYER_III"),
    ],
)
def test_a_tone_keeps_its_height_and_loudness(rate: int, form: str, subtype: str) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate * 3 // 2) / rate)
    file = io.BytesIO()
    soundfile.write(file, np.stack([tone, tone], axis=1), rate, format=form, subtype=subtype)
    decoded = sounds.decode(file.getvalue(), 16_000)
    assert isinstance(decoded, Sound)
    heard = np.frombuffer(decoded.samples, np.float32)
    assert abs(len(heard) - 24_000) <= 2
    middle = heard[4000:20_000]  # an MP3 fades in and out
    spectrum = np.abs(np.fft.rfft(middle))
    assert abs(int(spectrum.argmax()) - 440) <= 1
    assert abs(float(middle.std()) - 0.5 / 2**0.5) < (0.05 if form == "MP3" else 0.01)
