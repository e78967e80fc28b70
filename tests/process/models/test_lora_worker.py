"""`--lora` on the real process: each request is computed with its own adapters, beside others;
files that are not adapters are refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import DATA
from tests.conftest import StartWorker
from tests.support.bundled import bundled_gguf
from tests.support.commands import DEAF, diagnose
from tests.support.held import mid_stream
from tests.support.random_adapters import random_adapters
from tests.support.worker import WorkerProcess, run_to_exit
from tools.survival import EXACT, FIELDS, Alone, alone, prompt
from worker.devices.preflight import CHILD

ADAPTER = DATA / "adapter"
STORY = "Once upon a time"
N_TOKENS = 20
ADAPTERS: list[list[dict[str, Any]]] = [
    [],
    [{"id": 0, "scale": 1.0}],
    [{"id": "blue", "scale": 1.0}],
    [{"id": "red", "scale": 0.5}, {"id": 1, "scale": -0.5}],
]


@pytest.fixture(scope="module")
def worker(share_worker: StartWorker) -> WorkerProcess:
    red, blue = random_adapters(bundled_gguf("f32"))
    adapters = ("--lora", f"red={red}", "--lora", f"blue={blue}")
    flags = ("--slots", "16", "--crash-limit", "1000", *EXACT, *adapters)
    return share_worker("--model", str(bundled_gguf("f32")), *flags, can_be_held=True)


def completion(worker: WorkerProcess, text: str, **fields: Any) -> Any:
    body = {"prompt": text, "temperature": 0, "max_tokens": N_TOKENS} | fields
    return worker.answer("/v1/completions", body)


def text_of(worker: WorkerProcess, text: str, **fields: Any) -> str:
    return str(completion(worker, text, **fields)["choices"][0]["text"])


def test_sixteen_streams_with_different_adapters_get_the_tokens_that_each_gets_alone(
    worker: WorkerProcess,
) -> None:
    cases = [(prompt(name), lora) for name in ("Ada", "Bo", "Cy", "Di") for lora in ADAPTERS]
    expected = [alone(worker, text, N_TOKENS, lora=lora) for text, lora in cases]
    assert len({tuple(each.ids) for each in expected}) > 8, "the adapters change what is said"

    def stream(case: tuple[str, list[dict[str, Any]]]) -> list[int]:
        text, lora = case
        return worker.execute(text, **FIELDS | {"max_tokens": N_TOKENS, "lora": lora}).ids

    with ThreadPoolExecutor(len(cases)) as pool:
        streams = list(pool.map(stream, cases))
    for ids, whole in zip(streams, expected, strict=True):
        assert_same(ids, whole)


def assert_same(ids: list[int], whole: Alone) -> None:
    """Check that they are equal except for rounding."""
    assert len(ids) == len(whole.ids)
    assert whole.is_told_by(ids)


def test_a_stream_keeps_its_adapters_when_the_engine_dies(worker: WorkerProcess) -> None:
    text, lora = prompt("Eve"), ADAPTERS[3]
    whole = alone(worker, text, N_TOKENS, lora=lora)
    fields = FIELDS | {"max_tokens": N_TOKENS, "lora": lora}
    with mid_stream(worker, text, **fields) as reading:
        worker.kill_engine()
        worker.hold.unlink()
        stream = reading.rest()
    assert_same(stream.ids, whole)
    assert stream.events[-1].get("engine_restarts") == 1
    worker.wait_ready()


def test_an_adapter_is_a_model_of_every_dialect(worker: WorkerProcess) -> None:
    texts = {name: text_of(worker, STORY, model=name) for name in ("tiny-f32", "red", "blue")}
    assert len(set(texts.values())) == 3
    assert text_of(worker, STORY) == texts["tiny-f32"]
    assert text_of(worker, STORY, model="red", lora=[]) == texts["tiny-f32"], "its own list counts"
    assert completion(worker, STORY, model="red")["model"] == "red"
    listed = {each["id"]: each["parent"] for each in worker.get("/v1/models").json()["data"]}
    assert listed == {"tiny-f32": None, "red": "tiny-f32", "blue": "tiny-f32"}
    assert worker.get("/v1/models/blue").json()["root"] == "blue"
    tags = worker.get("/api/tags").json()["models"]
    assert [each["name"] for each in tags] == ["tiny-f32:latest", "red:latest", "blue:latest"]
    assert tags[1]["details"]["parent_model"] == "tiny-f32:latest"

    fields = {"prompt": STORY, "raw": True, "stream": False}
    options = {"temperature": 0, "num_predict": N_TOKENS}
    for name, model in (("red", "red:latest"), ("blue", "blue")):
        body = fields | {"model": model, "options": options}
        answer = worker.post("/api/generate", body).json()
        assert (answer["response"], answer["model"]) == (texts[name], f"{name}:latest")
    body = {"prompt": STORY, "temperature": 0, "n_predict": N_TOKENS, "lora": ADAPTERS[2]}
    answer = worker.post("/completion", body).json()
    assert answer["content"] == texts["blue"]
    assert answer["generation_settings"]["lora"] == [{"id": 1, "scale": 1.0}]

    chat = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 8}
    answers = {}
    for name in texts:
        openai = worker.post("/v1/chat/completions", chat | {"model": name}).json()
        anthropic = worker.post("/v1/messages", chat | {"model": name}).json()
        of_responses = {"input": "Who?", "temperature": 0, "max_output_tokens": 8, "model": name}
        responses = worker.post("/v1/responses", of_responses).json()
        ollama = {"options": {"temperature": 0, "num_predict": 8}, "stream": False, "model": name}
        of_ollama = worker.post("/api/chat", {"messages": chat["messages"]} | ollama).json()
        assert openai["model"] == anthropic["model"] == responses["model"] == name
        answers[name] = openai["choices"][0]["message"]["content"]
        assert anthropic["content"][0]["text"] == answers[name]
        assert responses["output"][-1]["content"][0]["text"] == answers[name]
        assert of_ollama["message"]["content"] == answers[name]
    assert len(set(answers.values())) == 3


def test_cells_of_other_adapters_are_not_reused(worker: WorkerProcess) -> None:
    text = prompt("Fay") + " walk and to sing and to read all the books that there are in the town."
    cached = {}
    for number, lora in enumerate([*ADAPTERS, [{"id": 0, "scale": 0.25}], *ADAPTERS]):
        usage = completion(worker, text, lora=lora)["usage"]
        cached[number] = usage["prompt_tokens_details"]["cached_tokens"]
    assert [cached[n] for n in range(5)] == [0] * 5
    assert all(cached[n] > 32 for n in range(5, 9))


def test_lora_adapters_sets_the_scales_of_requests_that_name_none(worker: WorkerProcess) -> None:
    """llama-server's paths: listed adapters are on, all others are off."""
    plain, red = text_of(worker, STORY), text_of(worker, STORY, model="red")
    assert text_of(worker, STORY, lora=[{"id": 0, "scale": 0}]) == plain
    assert text_of(worker, STORY, lora=[{"id": 0, "scale": 1e-60}]) == plain, "no float32 holds it"
    before = worker.get("/lora-adapters").json()
    assert [(each["id"], each["name"], each["scale"]) for each in before] == [
        (0, "red", 0.0),
        (1, "blue", 0.0),
    ]
    assert all("/" not in each["path"] for each in before)
    assert worker.post("/lora-adapters", [{"id": 0, "scale": 1.0}]).json() == {"success": True}
    assert [each["scale"] for each in worker.get("/lora-adapters").json()] == [1.0, 0.0]
    assert text_of(worker, STORY) == red and text_of(worker, STORY, lora=[]) == plain
    assert worker.post("/lora-adapters", []).json() == {"success": True}
    assert text_of(worker, STORY) == plain


@pytest.mark.parametrize(
    ("path", "body", "status", "field", "words"),
    [
        ("/v1/completions", {"model": "green"}, 404, "model", "'tiny-f32' or 'red' or 'blue'"),
        ("/v1/completions", {"lora": [{"id": 2, "scale": 1}]}, 400, "lora[0].id", "1 ('blue')"),
        ("/v1/completions", {"lora": [{"id": "x", "scale": 1}]}, 400, "lora[0].id", "0 ('red')"),
        ("/v1/completions", {"lora": [{"id": 0}]}, 400, "lora[0].scale", "required"),
        (
            "/v1/completions",
            {"lora": [{"id": 0, "scale": 1e9}]},
            400,
            "lora[0].scale",
            "at most 100",
        ),
        ("/execute", {"job_id": "j", "lora": [{"id": 0, "scale": 1, "x": 1}]}, 400, "lora", "x"),
        ("/lora-adapters", {"lora": [{"id": -1, "scale": 1}]}, 400, "lora[0].id", "must be"),
        ("/lora-adapters", {"id": 0, "scale": 0.5}, 400, "lora", "required"),
    ],
)
def test_an_invalid_adapter_of_a_request_is_named(
    worker: WorkerProcess, path: str, body: dict[str, Any], status: int, field: str, words: str
) -> None:
    answer = worker.post(path, {"prompt": STORY} | body)
    assert answer.status_code == status
    assert field in answer.text and words in answer.text.replace("\\u0027", "'")


def test_the_metrics_name_the_running_adapters(worker: WorkerProcess) -> None:
    def at_work() -> list[str]:
        series = next(
            family
            for family in text_string_to_metric_families(worker.get("/metrics").text)
            if family.name == "vllm:lora_requests_info"
        )
        (sample,) = series.samples
        labels = dict(sample.labels)
        assert labels.pop("max_lora") == "2" and abs(time.time() - sample.value) < 60
        return [labels["running_lora_adapters"], labels["waiting_lora_adapters"]]

    assert at_work() == ["", ""]
    lora = [{"id": 0, "scale": 1.0}]
    with mid_stream(worker, STORY, max_tokens=900, ignore_eos=True, lora=lora):
        assert at_work() == ["red", ""]
    worker.wait_idle()
    assert at_work() == ["", ""]


def test_an_adapter_without_a_name_is_the_default(
    start_worker: StartWorker, warm_cache: Path
) -> None:
    """A PEFT folder is converted for the served model."""
    worker = start_worker("--lora", str(ADAPTER))
    assert text_of(worker, STORY) != text_of(worker, STORY, lora=[])
    info = worker.get("/info").json()
    [adapter] = info["model"]["adapters"]
    assert (adapter["name"], adapter["scale"], adapter["is_default"]) == ("adapter", 1.0, True)
    assert "path" not in adapter
    size = adapter["size_bytes"]
    plain = diagnose(warm_cache).plan
    report = diagnose(warm_cache, lora=(str(ADAPTER),))
    assert plain is not None and report.plan is not None
    assert report.plan.parts["weights"] == plain.parts["weights"] + size
    assert info["engine"]["plan"]["weights"] == report.plan.parts["weights"]
    assert ("adapter", "ok") in [(check.name, check.status) for check in report.checks]


@pytest.mark.parametrize(("flag", "name"), [("--lora", "nowhere"), ("--control-vector", "no-gguf")])
def test_an_unreadable_adapter_or_vector_is_refused_with_its_flag(
    tmp_path: Path, warm_cache: Path, flag: str, name: str
) -> None:
    """By the engine, and by the doctor."""
    (tmp_path / "no-gguf").write_text("no GGUF")
    child = DEAF if flag == "--lora" else CHILD  # native code reads the vectors
    path = str(tmp_path / name)
    ended = run_to_exit("--port", "0", flag, path, cache_dir=warm_cache)
    assert ended.code == 3 and f"llorch-cpu: {flag}: " in ended.sentence
    assert name in ended.sentence and "Traceback" not in ended.stderr
    report = diagnose(warm_cache, child, **{flag.removeprefix("--").replace("-", "_"): path})
    (message,) = [check.text for check in report.checks if check.status == "failed"]
    assert message.startswith(f"{flag}: ") and report.exit_code == 3
