"""Sounds in chats: a worker whose model hears."""

from __future__ import annotations

import base64
import io
import random
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.pictures import picture, question
from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from tests.support.worker import WorkerProcess
from tests.system.worker.test_pictures import asked, llama_server, mutate, same_as_peers
from worker.engine.media import sound as sounds


def sound(seed: int = 0, seconds: float = 1.0, rate: int = 16_000, width: int = 2) -> bytes:
    dice = np.random.default_rng(seed)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(dice.bytes(int(seconds * rate) * width))
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
        (b"ID3" + bytes(100), "a WAV"),
        (sound(seconds=0.01), "takes 0.0 s"),
        (sound(rate=1000), "1000 Hz"),
        (sound()[:40], "a WAV"),
    ],
)
def test_what_is_no_sound_is_refused_by_the_fields_name(
    hearing: WorkerProcess, encoded: bytes, words: str
) -> None:
    answer = hearing.post("/v1/chat/completions", about(encoded))
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert words in message and "messages[0].content[0].input_audio.data" in message


def test_a_model_that_only_hears_is_shown_no_picture(hearing: WorkerProcess) -> None:
    answer = hearing.post("/v1/chat/completions", question(picture()))
    assert (
        answer.status_code == 400 and "does not see pictures" in answer.json()["error"]["message"]
    )


def test_damaged_sounds_end_no_process(hearing: WorkerProcess) -> None:
    dice = random.Random(random.randrange(1 << 30))
    engine = hearing.engine_pid
    for _ in range(100):
        damaged = mutate(sound(seconds=0.2, width=dice.randint(1, 4)), dice)
        answer = hearing.post("/v1/chat/completions", about(damaged, max_tokens=1))
        assert answer.status_code in (200, 400), (damaged.hex(), answer.text)
    assert hearing.engine_pid == engine


@pytest.mark.long
def test_llama_server_answers_the_same(hearing: WorkerProcess, tmp_path: Path) -> None:
    with llama_server(random_model("dense"), random_projector("qwen2a"), tmp_path) as base:
        for seed in (1, 2):
            assert same_as_peers(hearing, base, about(sound(seed)))


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_tone_keeps_its_height_and_loudness(rate: int, width: int) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    whole = np.round(tone * (1 << (8 * width - 1))).astype("<i8")
    if width == 1:
        whole += 128
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(2)
        out.setsampwidth(width)
        out.setframerate(rate)
        frames = np.stack([whole, whole], axis=1).reshape(-1, 1).view(np.uint8)
        out.writeframes(frames.reshape(-1, 8)[:, :width].tobytes())
    heard = sounds.decode(file.getvalue(), "x", 16_000)
    assert abs(len(heard) - 16_000) <= 2
    spectrum = np.abs(np.fft.rfft(heard[:15_990]))
    assert abs(int(spectrum.argmax()) - 440) <= 1
    assert abs(float(np.abs(heard).max()) - 0.5) < 0.03
