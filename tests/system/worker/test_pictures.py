"""Pictures in chats: a worker with a vision model, from the dialects down to the cells."""

from __future__ import annotations

import base64
import codecs
import http.server
import io
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from anthropic import Anthropic
from ollama import Client as Ollama
from openai import OpenAI
from PIL import Image

from builds.pins import pins
from tests.conftest import StartWorker
from tests.support.pictures import data_url, picture, question
from tests.support.ports import free_port
from tests.support.random_models import random_model
from tests.support.random_projectors import (
    AROUND_TILES,
    N_TOKENS,
    ProjectorKind,
    random_projector,
)
from tests.support.worker import WorkerProcess, asking, computed_s, run_to_exit, until
from tests.unit.models.native_loads import damaged
from tools.bench.peer_build import build_peers

KINDS: tuple[ProjectorKind, ...] = ("gemma3", "idefics3", "qwen3vl_merger", "pixtral")
"""A projector whose rows attend to each other, one that cuts pictures into tiles, one whose rows
have positions in time and space, and one whose parts depend on the picture's size."""
FORMS = {"PNG": "png", "JPEG": "jpeg", "GIF": "gif", "WEBP": "webp", "BMP": "bmp"}


def model(kind: ProjectorKind = "gemma3") -> Path:
    architecture = "qwen3vl" if kind == "qwen3vl_merger" else None
    return random_model("dense", renamed=AROUND_TILES, architecture=architecture)


def flags_of(kind: ProjectorKind) -> tuple[str, ...]:
    # Without flash attention, equal rows are computed in the same order in every batch.
    shape = ("--context-length", "1024", "--slots", "4", "--flash-attention", "off")
    files = ("--model", str(model(kind)), "--mmproj", str(random_projector(kind)))
    return *files, *shape, "--threads", "1"


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, share_worker: StartWorker) -> WorkerProcess:
    return share_worker(*flags_of(cast(ProjectorKind, request.param)))


once = pytest.mark.parametrize("seeing", KINDS[:1], indirect=True)
"""For tests of what happens before the projector, whichever it is."""


def text_of(worker: WorkerProcess, body: dict[str, Any]) -> str:
    answer = worker.answer("/v1/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"])


def test_the_answer_depends_on_the_picture(seeing: WorkerProcess) -> None:
    first, again, other = (text_of(seeing, question(picture(seed))) for seed in (1, 1, 2))
    assert first == again != other


@once
def test_each_description_of_the_model_names_vision(seeing: WorkerProcess) -> None:
    assert seeing.get("/props").json()["modalities"]["vision"]
    [entry] = seeing.get("/v1/models").json()["data"]
    assert entry["architecture"]["input_modalities"] == ["text", "image"]
    assert "vision" in seeing.post("/api/show", {"model": "x"}).json()["capabilities"]
    info = seeing.get("/info").json()
    assert info["engine"]["projector"]["sees"]
    assert info["engine"]["plan"]["projector"] > info["engine"]["projector"]["size_bytes"]


def test_a_second_question_on_one_picture_encodes_nothing(seeing: WorkerProcess) -> None:
    def encoded() -> float:
        seeing.wait_idle()
        return seeing.metric("worker_engine_media_encoded")

    image, before = picture(3), encoded()
    text_of(seeing, question(image, "and say what it is"))
    first = encoded()
    assert first > before
    # The same prefix reuses cells, another one reuses embeddings.
    text_of(seeing, question(image, "and tell me more"))
    text_of(seeing, question(image, before="What is this?"))
    assert encoded() == first
    # Nothing is reused under another salt.
    text_of(seeing, question(image, cache_salt="other"))
    assert encoded() > first


def test_a_cached_picture_changes_no_answer(seeing: WorkerProcess) -> None:
    image, texts = picture(4), ("and say what it is", "and tell me more", "then count")
    fresh = [text_of(seeing, question(image, text, cache_salt=text)) for text in texts]
    assert [text_of(seeing, question(image, text)) for text in texts] == fresh


def test_mixed_streams_of_pictures_and_texts_are_as_each_alone(seeing: WorkerProcess) -> None:
    bodies = [question(picture(seed % 3), f"and say {seed}") for seed in range(6)]
    text = [{"role": "user", "content": "Once upon a time"}]
    bodies += [{"temperature": 0, "max_tokens": 24, "messages": text}] * 6
    alone = [text_of(seeing, body) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        salted = [{**body, "cache_salt": str(at)} for at, body in enumerate(bodies)]
        assert list(pool.map(lambda body: text_of(seeing, body), salted)) == alone


@pytest.fixture
def clients(seeing: WorkerProcess) -> Iterator[tuple[OpenAI, Anthropic, Ollama]]:
    with (
        OpenAI(base_url=f"{seeing.base_url}/v1", api_key="none", max_retries=0) as openai,
        Anthropic(base_url=seeing.base_url, api_key="none", max_retries=0) as anthropic,
        Ollama(host=seeing.base_url) as ollama,
    ):
        yield openai, anthropic, ollama


@once
def test_all_dialects_show_the_same_picture(
    seeing: WorkerProcess, clients: tuple[OpenAI, Anthropic, Ollama]
) -> None:
    """Through their users' clients, whole and streamed."""
    openai, anthropic, ollama = (cast(Any, client) for client in clients)
    image, words, text = picture(5), "what is it", {"type": "text", "text": "what is it"}
    encoded, url = base64.b64encode(image).decode(), data_url(image)

    part = {"type": "image_url", "image_url": {"url": url}}
    chat: Any = {"model": "x", "messages": [{"role": "user", "content": [part, text]}]}
    chat |= {"temperature": 0, "max_tokens": 16}
    expected = openai.chat.completions.create(**chat).choices[0].message.content
    chunks = openai.chat.completions.create(**chat, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected

    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    content = [{"type": "image", "source": source}, text]
    turns: Any = {"model": "x", "messages": [{"role": "user", "content": content}]}
    asked_so: Any = {**turns, "max_tokens": 16, "extra_body": {"temperature": 0}}
    message = anthropic.messages.create(**asked_so)
    with anthropic.messages.stream(**asked_so) as stream:
        for each in (message, stream.get_final_message()):
            assert each.content[0].text == expected
            n_tokens = each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0)
            assert anthropic.messages.count_tokens(**turns).input_tokens == n_tokens > N_TOKENS

    item = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": words}]
    response: Any = {"model": "x", "input": [{"role": "user", "content": item}]}
    response |= {"temperature": 0, "max_output_tokens": 16}
    assert openai.responses.create(**response).output_text == expected
    events = openai.responses.create(**response, stream=True)
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == expected

    options = {"temperature": 0, "num_predict": 16}
    turn = {"role": "user", "content": words, "images": [image]}
    plain: Any = {"model": "x", "options": options}
    turns = {"messages": [turn]}
    assert ollama.chat(**plain, **turns).message.content == expected
    parts = ollama.chat(**plain, **turns, stream=True)
    assert "".join(each.message.content or "" for each in parts) == expected
    prompted: Any = {"prompt": words, "images": [encoded]}
    assert ollama.generate(**plain, **prompted).response == expected
    lines = ollama.generate(**plain, **prompted, stream=True)
    assert "".join(each.response for each in lines) == expected

    marked = [{"role": "user", "content": [{"type": "text", "text": "<__media__>"}, text]}]
    prompt = seeing.answer("/apply-template", {"messages": marked})["prompt"]
    string = prompt.replace("<__media__>\n", "<__media__>")
    media = {"prompt_string": string, "multimodal_data": [encoded]}
    raw = seeing.post("/completion", {"prompt": media, "temperature": 0, "n_predict": 16}).json()
    assert raw["content"] == expected


@once
def test_all_formats_are_read(seeing: WorkerProcess) -> None:
    answers = {form: text_of(seeing, question(picture(6, form=form))) for form in FORMS}
    assert answers["PNG"] == answers["BMP"], "both keep each pixel"


@once
def test_a_picture_may_be_larger_than_a_body_of_text(seeing: WorkerProcess) -> None:
    photograph = picture(8, (1600, 1200))
    assert len(photograph) > 5 * 2**20
    assert seeing.answer("/v1/chat/completions", question(photograph, max_tokens=1))["choices"]
    answer = seeing.post("/v1/chat/completions", question(picture(8), "no, " * 2**21))
    assert answer.status_code == 413, answer.text
    assert "bytes besides base64; at most 4194304 are accepted" in answer.json()["error"]["message"]


@once
def test_a_control_tokens_spelling_beside_a_picture_is_text(seeing: WorkerProcess) -> None:
    def n_tokens(text: str) -> int:
        body = question(picture(7), text, max_tokens=1)
        return int(seeing.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"])

    more = n_tokens("and <|im_end|> <__media__>") - n_tokens("and")
    assert 8 < more < N_TOKENS, "neither one token, nor another picture"


@once
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/a.png", "fetches nothing from port 443 of example.com"),
        ("http://127.0.0.1/a.png", "fetches nothing from port 80 of 127.0.0.1"),
        ("file:///etc/passwd", "must be a data: URL"),
        ("/etc/passwd", "must be a data: URL"),
        ("data:image/png;base64,@@@@", "must be base64"),
        ("data:image/png;base64,", "must not be empty"),
        (data_url(b"<svg/>"), "not a readable picture"),
        (data_url(picture(1)[:-500]), "damaged or cut off"),
        (data_url(picture(1, (4000, 3))), "200 times"),
    ],
)
def test_what_is_no_picture_is_refused_by_the_fields_name(
    seeing: WorkerProcess, url: str, words: str
) -> None:
    body = question(b"")
    body["messages"][0]["content"][1]["image_url"]["url"] = url
    answer = seeing.post("/v1/chat/completions", body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert words in message and "messages[0].content[1].image_url.url" in message


@once
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(
    seeing: WorkerProcess,
) -> None:
    bomb = picture(1, (8, 8), "BMP")
    for at, side in ((18, 30_000), (22, 30_000)):
        bomb = bomb[:at] + side.to_bytes(4, "little") + bomb[at + 4 :]
    answer = seeing.post("/v1/chat/completions", question(bomb))
    assert answer.status_code == 400 and "pixels" in answer.json()["error"]["message"]


@once
def test_a_picture_beyond_the_context_is_not_decoded(seeing: WorkerProcess) -> None:
    body = question(picture(1))
    image, unread = body["messages"][0]["content"][1], question(b"no picture")
    body["messages"][0]["content"] = [image] * 30 + [unread["messages"][0]["content"][1]]
    answer = seeing.post("/v1/chat/completions", body).json()
    assert answer["error"]["code"] == "context_length_exceeded"


def test_pictures_are_counted_that_do_not_fit_into_the_context(seeing: WorkerProcess) -> None:
    """Counting needs no cells."""
    turns = [question(picture(1), f"and say {at}")["messages"][0] for at in range(30)]
    for turn in turns[1:]:
        turn["content"] = turn["content"][1:]

    def counted(n_turns: int) -> int:
        body = {"messages": turns[:n_turns], "model": "x"}
        return int(seeing.answer("/v1/chat/completions/input_tokens", body)["input_tokens"])

    one, two, all_of_them = map(counted, (1, 2, 30))
    assert all_of_them > 1024 and abs(all_of_them - one - 29 * (two - one)) < 60
    refused = seeing.post("/v1/chat/completions", {"messages": turns}).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert text_of(seeing, question(picture(1))), "nothing of what was counted is held"


def mutate(encoded: bytes, random: random.Random) -> bytes:
    """Return a copy with some bytes changed, removed or doubled."""
    damaged = bytearray(encoded)
    for _ in range(random.randint(1, 8)):
        at = random.randrange(len(damaged))
        match random.randrange(4):
            case 0:
                damaged[at] = random.randrange(256)
            case 1:
                damaged[at : at + 4] = random.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"])
            case 2:
                del damaged[at : at + random.randint(1, 64)]
            case _:
                damaged[at:at] = damaged[at : at + random.randint(1, 64)]
        if not damaged:
            return b"\0"
    return bytes(damaged)


def send_all_damaged(
    worker: WorkerProcess,
    whole: list[bytes],
    n_media: int,
    body_of: Callable[[bytes], dict[str, Any]],
) -> None:
    """Send copies of `whole`, each damaged differently: any answer is right unless a process
    dies."""
    dice = random.Random()
    pid, engine = worker.pid, worker.engine_pid

    def send(encoded: bytes) -> None:
        answer = worker.post("/v1/chat/completions", body_of(encoded))
        assert answer.status_code in (200, 400), (encoded.hex(), answer.text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, (mutate(dice.choice(whole), dice) for _ in range(n_media))))
    assert (worker.pid, worker.engine_pid) == (pid, engine), "neither process has died"


@pytest.mark.parametrize("n_pictures", [240, pytest.param(10_000, marks=pytest.mark.long)])
def test_damaged_pictures_end_no_process(seeing: WorkerProcess, n_pictures: int) -> None:
    whole = [picture(1, (40, 30), form) for form in FORMS]
    send_all_damaged(
        seeing, whole, n_pictures // len(KINDS), lambda each: question(each, max_tokens=1)
    )


def test_a_stream_survives_the_death_of_the_engine(seeing: WorkerProcess) -> None:
    body = question(picture(8), max_tokens=120, ignore_eos=True, stream=True)
    whole = text_of(seeing, {**body, "stream": False, "cache_salt": "alone"})
    text, first = "", seeing.engine_pid
    with seeing.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    delta = httpx.Response(200, text=line[6:]).json()["choices"][0]["delta"]
                    if not text and delta.get("content"):
                        os.kill(first, signal.SIGKILL)
                    text += delta.get("content") or ""
    assert text == whole
    until(lambda: seeing.engine_pid != first, lambda: seeing.stderr[-2000:], seeing)
    seeing.wait_ready()


@once
def test_a_cancelled_question_frees_its_cells(seeing: WorkerProcess) -> None:
    body = question(picture(9), max_tokens=900, ignore_eos=True, stream=True)
    with seeing.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_lines())
    seeing.wait_idle()
    seeing.wait_for_free_cells()


@once
def test_a_cancelled_questions_pictures_are_not_decoded(seeing: WorkerProcess) -> None:
    """Each takes a second, for which the next request would wait."""
    image = io.BytesIO()
    Image.new("RGB", (5000, 5000)).save(image, "PNG")
    pictures = [image.getvalue() + bytes([number]) for number in range(15)]  # all are different
    content = [question(each)["messages"][0]["content"][1] for each in pictures]
    text_of(seeing, question(picture(2), max_tokens=1))  # by then each process has started
    processes = seeing.processes
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
        body = {"model": "x", "messages": [{"role": "user", "content": content}]}
        begun = computed_s(processes) + 0.5
        with asking(seeing.port, path, body):
            while computed_s(processes) < begun:  # with the first one
                time.sleep(0.02)
        began = computed_s(processes)
        text_of(seeing, question(picture(1), max_tokens=1))
        assert computed_s(processes) - began < 5


class Pictures(http.server.BaseHTTPRequestHandler):
    """A host with one picture, and with a redirect to other ports of this machine."""

    def do_GET(self) -> None:
        if self.path == "/nowhere":
            self.send_response(304)
            self.end_headers()
        elif self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1:22/")
            self.end_headers()
        elif self.path == "/late":
            time.sleep(2)
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(picture(5))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_pictures_are_fetched_only_from_allowed_hosts(start_worker: StartWorker) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as host:
        threading.Thread(target=host.serve_forever, args=(0.02,), daemon=True).start()
        at = f"127.0.0.1:{host.server_port}"
        flags = ("--allow-media-host", at, "--strict")
        worker = start_worker(*flags_of("gemma3"), *flags)
        url = {"type": "url", "url": f"http://{at}/x.png"}
        whole = text_of(worker, question(picture(5)))
        body = question(b"")
        for name, words in (("x.png", None), ("elsewhere", "port 22"), ("nowhere", "304")):
            body["messages"][0]["content"][1]["image_url"]["url"] = f"http://{at}/{name}"
            answer = worker.post("/v1/chat/completions", body)
            if words is None:
                assert answer.json()["choices"][0]["message"]["content"] == whole
            else:
                assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        body["messages"][0]["content"][1]["image_url"]["url"] = f"http://{at}/late"
        for path in ("", "/input_tokens"):
            headers = {"X-Deadline": str(int(time.time() * 1000) + 500)}
            with worker.client() as client:
                answer = client.post(f"/v1/chat/completions{path}", json=body, headers=headers)
            assert answer.status_code == 504, answer.text
        turns = [{"role": "user", "content": [{"type": "image", "source": url}]}]
        turn = {"model": "dense", "messages": turns}
        assert worker.post("/v1/messages/count_tokens", turn).json()["input_tokens"] > N_TOKENS
        host.shutdown()


# --- which projector -----------------------------------------------------------------------------


def test_a_projector_that_lacks_tokens_is_passed_over_or_stops_the_start(
    start_worker: StartWorker, warm_cache: Path, tmp_path: Path
) -> None:
    """Only the engine notices this: for one beside the model, and for a named one."""
    path = str(shutil.copy(random_model("dense"), tmp_path / "dense.gguf"))
    beside = str(shutil.copy(random_projector("idefics3"), tmp_path / "mmproj-dense-f32.gguf"))
    unfit = start_worker("--model", path, "--context-length", "512")
    assert unfit.get("/info").json()["engine"]["projector"] is None
    assert "lacks tokens" in unfit.logs("engine.projector_passed_over")[0]["reason"]
    answer = unfit.post("/v1/chat/completions", question(picture()))
    assert answer.status_code == 400
    assert "--mmproj FILE" in answer.json()["error"]["message"]
    flags = ("--port", "0", "--model", path, "--mmproj", beside)
    ended = run_to_exit(*flags, cache_dir=warm_cache)
    assert ended.code == 3 and "lacks tokens" in ended.sentence, ended.stderr


def test_a_damaged_projector_is_named_where_native_code_dies_of_it(
    warm_cache: Path, tmp_path: Path
) -> None:
    key, source = "clip.vision.patch_size", random_projector("qwen3vl_merger")
    projector = damaged(source, tmp_path / "mmproj.gguf", key, 3)
    flags = ("--port", "0", "--model", str(model("qwen3vl_merger")), "--mmproj", str(projector))
    ended = run_to_exit(*flags, cache_dir=warm_cache)
    assert ended.code == 3 and f"the projector '{projector}'" in ended.sentence, ended.stderr


# --- the peer ------------------------------------------------------------------------------------


@contextmanager
def llama_server(
    model: Path,
    projector: Path,
    folder: Path,
    *flags: str,
    program: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run the peer with the same files; yields its address."""
    program = program or build_peers(pins(), os.cpu_count() or 1).program("llama-server")
    port = free_port()
    files = ["-m", str(model), "--mmproj", str(projector)]
    shape = ["-np", "1", "-c", "2048", "-fa", "off", "-t", "2", "--port", str(port), "--jinja"]
    with (folder / "peer.log").open("wb") as log:
        peer = subprocess.Popen([program, *files, *shape, *flags], stdout=log, stderr=log, env=env)
    base = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{base}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(is_ready, lambda: (folder / "peer.log").read_text())
        yield base
    finally:
        peer.kill()
        peer.wait()


QUESTIONS = [
    question(picture(seed, (300 - 100 * seed, 120)), text)
    for seed, text in ((1, "and say what it is"), (1, "and on"), (2, "and say what it is"))
]


def same_as_peers(
    worker: WorkerProcess, base: str, body: dict[str, Any], rounding: float = 0
) -> bool:
    """Whether the worker's answer equals the peer's, up to a token whose log-probability is within
    `rounding` of the next best."""
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=120).json()
    expected = str(answer["choices"][0]["message"]["content"])
    scored = worker.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2})
    [choice] = scored.json()["choices"]
    # A character that is cut off at the end may be sent or left out.
    if choice["message"]["content"].rstrip("\ufffd") == expected.rstrip("\ufffd"):
        return True
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    tokens = choice["logprobs"]["content"]
    for token in tokens:
        text += decoder.decode(bytes(token["bytes"]), final=token is tokens[-1])
        if not expected.startswith(text):
            best, second = (each["logprob"] for each in token["top_logprobs"])
            print(f"they part at {text!r} of {expected!r}, by {best - second:.3f}")
            return bool(best - second < rounding)
    return False


@pytest.mark.long
def test_llama_server_answers_the_same(seeing: WorkerProcess, tmp_path: Path) -> None:
    kind = seeing.get("/info").json()["engine"]["projector"]["kind"]
    with llama_server(model(kind), random_projector(kind), tmp_path) as base:
        assert all(same_as_peers(seeing, base, body) for body in QUESTIONS)
