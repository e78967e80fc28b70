"""Sounds in chats: a worker with an audio model."""

from __future__ import annotations

import base64
import io
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from tests.conftest import StartWorker
from tests.support.pictures import picture, question
from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from tests.support.sounds import silence, without_length
from tests.support.worker import WorkerProcess, computed_s
from tests.system.worker.test_pictures import llama_server, same_as_peers, send_all_damaged, text_of

KINDS = {"WAV": "wav", "FLAC": "flac", "MP3": "mp3"}


def sound(seed: int = 0, seconds: float = 1.0, rate: int = 16_000, form: str = "WAV") -> bytes:
    noise = np.random.default_rng(seed).uniform(-1, 1, int(seconds * rate))
    soundfile.write(file := io.BytesIO(), noise, rate, format=form)
    return file.getvalue()


def loud(loudest: float) -> bytes:
    """A sound of 32-bit floats with one such sample after one second."""
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
def hearing(share_worker: StartWorker) -> WorkerProcess:
    flags = ["--model", str(random_model("dense")), "--mmproj", str(random_projector("qwen2a"))]
    flags += ["--context-length", "2048", "--slots", "2", "--flash-attention", "off"]
    return share_worker(*flags, "--max-body-bytes", str(1 << 25))


def test_the_answer_depends_on_the_sound(hearing: WorkerProcess) -> None:
    assert hearing.get("/props").json()["modalities"]["audio"]

    def heard(seed: int) -> float:
        body = about(sound(seed), logprobs=True, max_tokens=1)
        answer = hearing.post("/v1/chat/completions", body).json()
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    assert abs(heard(1) - heard(1)) < 1e-4 < abs(heard(1) - heard(2))


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (b"ID3" + bytes(100), "WAV, FLAC or MP3"),
        (b"OggS" + bytes(100), "WAV, FLAC or MP3"),
        (sound(seconds=0.01), "takes 0.01 s"),
        (loud(math.nan), "not numbers"),
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
    text_of(hearing, about(loud(loudest)))


def test_a_model_that_only_hears_is_shown_no_picture(hearing: WorkerProcess) -> None:
    answer = hearing.post("/v1/chat/completions", question(picture()))
    assert (
        answer.status_code == 400 and "does not see pictures" in answer.json()["error"]["message"]
    )


def test_all_dialects_play_the_same_sound(hearing: WorkerProcess) -> None:
    encoded, words = base64.b64encode(sound(9)).decode(), "what is it"
    expected = text_of(hearing, about(sound(9), words))
    audio = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    content = [audio, {"type": "input_text", "text": words}]
    body: Any = {"input": [{"role": "user", "content": content}]}
    body |= {"temperature": 0, "max_output_tokens": 16}
    output = hearing.post("/v1/responses", body).json()["output"]
    assert output[-1]["content"][0]["text"] == expected

    body = {"model": "x", "stream": False, "options": {"temperature": 0, "num_predict": 16}}
    turn = {"role": "user", "content": words, "images": [encoded]}
    answer = hearing.post("/api/chat", {**body, "messages": [turn]}).json()
    assert answer["message"]["content"] == expected
    answer = hearing.post("/api/generate", {**body, "prompt": words, "images": [encoded]}).json()
    assert answer["response"] == expected

    marked = [{"role": "user", "content": f"<__media__>{words}"}]
    string = hearing.post("/apply-template", {"messages": marked}).json()["prompt"]
    prompt = {"prompt_string": string, "multimodal_data": [encoded]}
    body = {"prompt": prompt, "temperature": 0, "n_predict": 16}
    assert hearing.post("/completion", body).json()["content"] == expected


def test_all_formats_are_heard(hearing: WorkerProcess) -> None:
    heard = [text_of(hearing, about(sound(4, form=form))) for form in ("WAV", "FLAC")]
    assert heard[0] == heard[1], "both keep each sample"
    text_of(hearing, about(sound(4, form="MP3")))


def test_a_sound_that_is_longer_than_its_header_says_is_cut_at_the_bound(
    hearing: WorkerProcess,
) -> None:
    """A FLAC need not state its length."""
    whole = silence(1900)
    for encoded, words in ((whole, "it may take"), (without_length(whole), "context length")):
        answer = hearing.post("/v1/chat/completions", about(encoded))
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.5])
def test_a_flac_without_its_length_is_heard_alike(hearing: WorkerProcess, seconds: float) -> None:
    encoded = sound(8, seconds, form="FLAC")
    assert text_of(hearing, about(without_length(encoded))) == text_of(hearing, about(encoded))


@pytest.mark.parametrize("form", KINDS)
def test_a_sound_that_cannot_fit_is_refused_before_it_is_decoded(
    hearing: WorkerProcess, form: str
) -> None:
    """Half an hour has 45,000 tokens, and decoding and preparing it takes seconds."""
    text_of(hearing, about(sound(5)))  # measures how many tokens a second has
    encoded = silence(1800, 8000, form) if form == "MP3" else silence(1500, form=form)
    began = computed_s(hearing.children())
    answer = hearing.post("/v1/chat/completions", about(encoded)).json()["error"]
    assert answer["code"] == "context_length_exceeded", answer
    n_tokens = int(answer["message"].split("requested ")[1].split()[0])
    assert n_tokens > (2048 if form == "MP3" else 30_000), "as many as are known"
    assert computed_s(hearing.children()) - began < 1.0


def test_a_sound_that_fills_the_context_is_heard(hearing: WorkerProcess) -> None:
    """Two windows of 30 seconds fit, and three do not."""
    text_of(hearing, about(sound(6, 59.9)))
    answer = hearing.post("/v1/chat/completions", about(sound(6, 60.1))).json()["error"]
    assert answer["code"] == "context_length_exceeded"


def test_sounds_are_counted_that_do_not_fit_into_the_context(hearing: WorkerProcess) -> None:
    def counted(seconds: float) -> httpx.Response:
        messages = about(sound(7, seconds, 4000))["messages"]
        path = "/v1/chat/completions/input_tokens"
        return hearing.post(path, {"model": "x", "messages": messages})

    short, long = (counted(seconds).json()["input_tokens"] for seconds in (1, 91))
    assert long - short == 3 * 750 > 2048
    # The first is prepared and leaves too little room for the second, which is not.
    messages = [*about(silence(1010))["messages"], *about(silence(1790))["messages"]]
    body = {"model": "x", "messages": messages}
    answer = hearing.post("/v1/chat/completions/input_tokens", body)
    assert answer.status_code == 400 and "65536 of them are counted" in answer.text


@pytest.mark.parametrize("n_sounds", [40, pytest.param(10_000, marks=pytest.mark.long)])
def test_damaged_sounds_end_no_process(hearing: WorkerProcess, n_sounds: int) -> None:
    whole = [sound(1, 0.2, form=form) for form in KINDS]
    send_all_damaged(hearing, whole, n_sounds, lambda encoded: about(encoded, max_tokens=1))


@pytest.mark.long
def test_llama_server_answers_the_same(hearing: WorkerProcess, tmp_path: Path) -> None:
    with llama_server(random_model("dense"), random_projector("qwen2a"), tmp_path) as base:
        for seed, form in enumerate(KINDS):
            assert same_as_peers(hearing, base, about(sound(seed, form=form)))
