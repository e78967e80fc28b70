"""Sounds in chats: a worker whose model hears."""

from __future__ import annotations

import base64
import io
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.support.pictures import picture, question
from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from tests.support.worker import WorkerProcess
from tests.system.worker.test_pictures import asked, llama_server, same_as_peers, send_all_damaged
from worker.engine.media import sound as sounds

KINDS = {"WAV": "wav", "FLAC": "flac", "MP3": "mp3"}


def sound(seed: int = 0, seconds: float = 1.0, rate: int = 16_000, form: str = "WAV") -> bytes:
    noise = np.random.default_rng(seed).uniform(-1, 1, int(seconds * rate))
    soundfile.write(file := io.BytesIO(), noise, rate, format=form)
    return file.getvalue()


def loud(loudest: float) -> bytes:
    """A sound of 32-bit floats with one such sample in its second second."""
    samples = np.zeros(24_000, np.float32)
    samples[20_000] = loudest
    soundfile.write(file := io.BytesIO(), samples, 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def about(encoded: bytes, text: str = "and say what it is", **more: Any) -> dict[str, Any]:
    data = {"data": base64.b64encode(encoded).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": data}, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return {"temperature": 0, "max_tokens": 16, "messages": messages, **more}


@pytest.fixture(scope="module")
def hearing(warm_cache: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    flags = ["--model", str(random_model("dense")), "--mmproj", str(random_projector("qwen2a"))]
    flags += ["--context-length", "2048", "--slots", "2", "--flash-attention", "off"]
    folder = tmp_path_factory.mktemp("hearing")
    worker = WorkerProcess.start(*flags, folder=folder, cache_dir=warm_cache)
    yield worker
    assert worker.stop() == 0


def test_the_answer_depends_on_the_sound(hearing: WorkerProcess) -> None:
    assert hearing.get("/props").json()["modalities"]["audio"]

    def heard(seed: int) -> float:
        body = about(sound(seed), logprobs=True, max_tokens=1)
        answer = hearing.post("/v1/chat/completions", body).json()
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    assert abs(heard(1) - heard(1)) < 1e-4 < abs(heard(1) - heard(2))


def test_a_second_question_on_one_sound_encodes_nothing(hearing: WorkerProcess) -> None:
    asked(hearing, about(sound(3)))
    hearing.wait_idle()
    before = hearing.metric("worker_engine_media_encoded")
    asked(hearing, about(sound(3), "and tell me more"))
    hearing.wait_idle()
    assert hearing.metric("worker_engine_media_encoded") == before > 0


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (b"ID3" + bytes(100), "WAV, FLAC or MP3"),
        (b"OggS" + bytes(100), "WAV, FLAC or MP3"),
        (sound(seconds=0.01), "takes 0.0 s"),
        (loud(math.nan), "no numbers"),
        (loud(-math.inf), "1000000 times as loud"),
        (loud(3e38), "1000000 times as loud"),
        (sound(rate=1000), "1000 Hz"),
        (sound()[:40], "WAV, FLAC or MP3"),
    ],
)
def test_what_is_no_sound_is_refused_by_the_fields_name(
    hearing: WorkerProcess, encoded: bytes, words: str
) -> None:
    answer = hearing.post("/v1/chat/completions", about(encoded))
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert words in message and "messages[0].content[0].input_audio.data" in message


@pytest.mark.parametrize("loudest", [1.0, 100.0, 1e6])
def test_a_sound_beyond_full_scale_is_heard(hearing: WorkerProcess, loudest: float) -> None:
    asked(hearing, about(loud(loudest)))


def test_a_model_that_only_hears_is_shown_no_picture(hearing: WorkerProcess) -> None:
    answer = hearing.post("/v1/chat/completions", question(picture()))
    assert (
        answer.status_code == 400 and "does not see pictures" in answer.json()["error"]["message"]
    )


def test_all_formats_are_heard(hearing: WorkerProcess) -> None:
    heard = [asked(hearing, about(sound(4, form=form))) for form in ("WAV", "FLAC")]
    assert heard[0] == heard[1], "both keep each sample"
    asked(hearing, about(sound(4, form="MP3")))


def test_a_sound_that_is_longer_than_its_header_says_is_cut_at_the_bound(
    hearing: WorkerProcess,
) -> None:
    """A FLAC of silence is small, however long it is, and need not tell how long that is."""
    soundfile.write(file := io.BytesIO(), np.zeros(4000 * 1900, np.int16), 4000, format="FLAC")
    whole = bytearray(file.getvalue())
    for told in (bytes(whole[21:26]), bytes([whole[21] & 0xF0, *bytes(4)])):
        whole[21:26] = told
        answer = hearing.post("/v1/chat/completions", about(bytes(whole)))
        assert answer.status_code == 400 and "it may take" in answer.json()["error"]["message"]


def send_damaged(worker: WorkerProcess, n_sounds: int, seed: int) -> None:
    whole = [sound(seed, 0.2, form=form) for form in KINDS]
    send_all_damaged(worker, whole, n_sounds, seed, lambda encoded: about(encoded, max_tokens=1))


def test_damaged_sounds_end_no_process(hearing: WorkerProcess) -> None:
    send_damaged(hearing, 40, seed=random.randrange(1 << 30))


@pytest.mark.long
def test_ten_thousand_damaged_sounds_end_no_process(hearing: WorkerProcess) -> None:
    send_damaged(hearing, 10_000, seed=random.randrange(1 << 30))


@pytest.mark.long
def test_llama_server_answers_the_same(hearing: WorkerProcess, tmp_path: Path) -> None:
    with llama_server(random_model("dense"), random_projector("qwen2a"), tmp_path) as base:
        for seed, form in enumerate(KINDS):
            assert same_as_peers(hearing, base, about(sound(seed, form=form)))


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
    heard = np.frombuffer(sounds.decode(file.getvalue(), 16_000).samples, np.float32)
    assert abs(len(heard) - 24_000) <= 2
    middle = heard[4000:20_000]  # an MP3 begins and ends softly
    spectrum = np.abs(np.fft.rfft(middle))
    assert abs(int(spectrum.argmax()) - 440) <= 1
    assert abs(float(middle.std()) - 0.5 / 2**0.5) < (0.05 if form == "MP3" else 0.01)
