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
from tests.support.worker import WorkerProcess, computed_s
from tests.system.worker.test_pictures import asked, llama_server, same_as_peers, send_all_damaged
from worker.engine.media import sound as sounds
from worker.engine.media.decoder import Sound, TooLong

KINDS = {"WAV": "wav", "FLAC": "flac", "MP3": "mp3"}


def sound(seed: int = 0, seconds: float = 1.0, rate: int = 16_000, form: str = "WAV") -> bytes:
    noise = np.random.default_rng(seed).uniform(-1, 1, int(seconds * rate))
    soundfile.write(file := io.BytesIO(), noise, rate, format=form)
    return file.getvalue()


def silence(seconds: int, rate: int = 4000, form: str = "FLAC") -> bytes:
    """Return silence, which is small as a FLAC, however long it is."""
    soundfile.write(file := io.BytesIO(), np.zeros(rate * seconds, np.int16), rate, format=form)
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
    asked(hearing, about(loud(loudest)))


def test_a_model_that_only_hears_is_shown_no_picture(hearing: WorkerProcess) -> None:
    answer = hearing.post("/v1/chat/completions", question(picture()))
    assert (
        answer.status_code == 400 and "does not see pictures" in answer.json()["error"]["message"]
    )


def test_all_dialects_play_the_same_sound(hearing: WorkerProcess) -> None:
    encoded, words = base64.b64encode(sound(9)).decode(), "what is it"
    expected = asked(hearing, about(sound(9), words))
    given = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    content = [given, {"type": "input_text", "text": words}]
    body: Any = {"input": [{"role": "user", "content": content}]}
    body |= {"temperature": 0, "max_output_tokens": 16}
    output = hearing.post("/v1/responses", body).json()["output"]
    assert output[-1]["content"][0]["text"] == expected

    body = {"model": "x", "stream": False, "options": {"temperature": 0, "num_predict": 16}}
    turn = {"role": "user", "content": words, "images": [encoded]}
    said = hearing.post("/api/chat", {**body, "messages": [turn]}).json()
    assert said["message"]["content"] == expected
    said = hearing.post("/api/generate", {**body, "prompt": words, "images": [encoded]}).json()
    assert said["response"] == expected

    marked = [{"role": "user", "content": f"<__media__>{words}"}]
    string = hearing.post("/apply-template", {"messages": marked}).json()["prompt"]
    prompt = {"prompt_string": string, "multimodal_data": [encoded]}
    body = {"prompt": prompt, "temperature": 0, "n_predict": 16}
    assert hearing.post("/completion", body).json()["content"] == expected


def test_all_formats_are_heard(hearing: WorkerProcess) -> None:
    heard = [asked(hearing, about(sound(4, form=form))) for form in ("WAV", "FLAC")]
    assert heard[0] == heard[1], "both keep each sample"
    asked(hearing, about(sound(4, form="MP3")))


def test_a_sound_that_is_longer_than_its_header_says_is_cut_at_the_bound(
    hearing: WorkerProcess,
) -> None:
    """A FLAC need not state its length."""
    whole = silence(1900)
    for encoded, words in ((whole, "it may take"), (untold(whole), "context length")):
        answer = hearing.post("/v1/chat/completions", about(encoded))
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def untold(flac: bytes) -> bytes:
    """A FLAC whose header does not state its length, as encoders write it into a pipe."""
    return flac[:21] + bytes([flac[21] & 0xF0, *bytes(4)]) + flac[26:]


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.5])
def test_a_flac_without_its_length_is_heard_alike(hearing: WorkerProcess, seconds: float) -> None:
    encoded = sound(8, seconds, form="FLAC")
    assert asked(hearing, about(untold(encoded))) == asked(hearing, about(encoded))


@pytest.mark.parametrize("form", KINDS)
def test_a_sound_that_cannot_fit_is_refused_before_it_is_decoded(
    hearing: WorkerProcess, form: str
) -> None:
    """Half an hour has 45,000 tokens, and decoding and preparing it takes seconds."""
    asked(hearing, about(sound(5)))  # measures how many tokens a second has
    encoded = silence(1800, 8000, form) if form == "MP3" else silence(1500, form=form)
    began = computed_s(hearing.children())
    answer = hearing.post("/v1/chat/completions", about(encoded)).json()["error"]
    assert answer["code"] == "context_length_exceeded", answer
    n_tokens = int(answer["message"].split("requested ")[1].split()[0])
    assert n_tokens > (2048 if form == "MP3" else 30_000), "as many as are known"
    assert computed_s(hearing.children()) - began < 1.0


def test_a_sound_that_fills_the_context_is_heard(hearing: WorkerProcess) -> None:
    """Two windows of 30 seconds fit, and three do not."""
    asked(hearing, about(sound(6, 59.9)))
    answer = hearing.post("/v1/chat/completions", about(sound(6, 60.1))).json()["error"]
    assert answer["code"] == "context_length_exceeded"


def test_no_more_of_a_long_sound_is_decoded_than_it_takes() -> None:
    whole = silence(1000)
    for encoded, known in ((whole, 1000.0), (untold(whole), 101.0)):
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
