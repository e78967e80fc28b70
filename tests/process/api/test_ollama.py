"""Ollama's API on the real process, and that a dialect is one folder and one line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import ROOT
from tests.support.scripted_api import ScriptedFactory
from tests.support.scripted_engine import info
from tests.support.supervised import CONFIG
from tests.support.worker import WorkerProcess

NAME = "tiny-model:latest"


# --- the model ---------------------------------------------------------------------------


def test_the_model_is_listed_with_a_tag(worker: WorkerProcess) -> None:
    [listed] = worker.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == NAME
    assert listed["size"] > 2_000_000 and re.fullmatch("[0-9a-f]{64}", listed["digest"])
    assert datetime.fromisoformat(listed["modified_at"]).tzinfo is not None
    assert worker.get("/api/tags").json()["models"] == [listed], "nothing has changed"
    details = listed["details"]
    assert (details["format"], details["family"], details["families"]) == (
        "gguf",
        "llama",
        ["llama"],
    )
    assert details["parameter_size"] == "2.62M"
    assert (details["context_length"], details["embedding_length"]) == (1024, 256)
    assert listed["capabilities"] == ["completion", "tools"]
    [running] = worker.get("/api/ps").json()["models"]
    assert running["name"] == NAME and running["digest"] == listed["digest"]
    assert running["context_length"] == 1024 and running["size_vram"] == 0  # not on a GPU
    assert datetime.fromisoformat(running["expires_at"]).year > 2100, "it stays loaded"


@pytest.mark.parametrize("field", ["model", "name"])
def test_show_describes_the_model(worker: WorkerProcess, field: str) -> None:
    shown = worker.post("/api/show", {field: NAME, "verbose": False}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 1024
    assert shown["model_info"]["general.parameter_count"] > 2_000_000
    assert "<|im_start|>" in shown["template"]
    assert re.search(r"^temperature +0\.8$", shown["parameters"], re.MULTILINE)


def test_the_version_is_one_that_clients_accept(worker: WorkerProcess) -> None:
    parts = worker.get("/api/version").json()["version"].split(".")
    assert [int(part) for part in parts] >= [0, 6, 0]


@pytest.fixture
def named(scripted: ScriptedFactory) -> Iterator[httpx.Client]:
    """A client of a worker with two names and without pages."""
    worker = scripted(info(CONFIG), page=False, served_model_name=("tiny", "fox:7b"))
    with httpx.Client(base_url=worker.base_url) as client:
        yield client


def test_the_root_answers_as_ollama_only_without_a_page(
    worker: WorkerProcess, named: httpx.Client
) -> None:
    for url, text in ((named.base_url, "Ollama is running"), (worker.base_url, "<!doctype html>")):
        assert httpx.head(url).status_code == 200
        assert httpx.get(url).text.startswith(text)


def test_without_pages_their_paths_are_404(named: httpx.Client) -> None:
    assert "<html" not in named.get("/").text
    for path in ("/docs", "/chat/", "/chat/props", "/page/app.js"):
        assert named.get(path).status_code == 404
    assert named.get("/health").status_code == 200


def test_a_served_name_is_accepted_with_and_without_latest(named: httpx.Client) -> None:
    names = [each["name"] for each in named.get("/api/tags").json()["models"]]
    assert names == ["tiny:latest", "fox:7b"]
    for name in ("tiny", "tiny:latest", "fox:7b"):
        assert named.post("/api/show", json={"model": name}).status_code == 200
    for name in ("fox", "fox:latest", "tiny:7b"):
        refused = named.post("/api/show", json={"model": name})
        assert refused.status_code == 404 and refused.json().keys() == {"error"}


def test_pulling_the_served_model_succeeds_and_any_other_change_is_a_404(
    worker: WorkerProcess,
) -> None:
    [line] = lines_of(worker.post("/api/pull", {"model": NAME}))
    assert line == worker.post("/api/pull", {"name": NAME, "stream": False}).json()
    assert line == {"status": "success"}
    with worker.client() as client:
        for method, name in (
            *(("POST", name) for name in ("pull", "push", "create", "copy")),
            ("DELETE", "delete"),
        ):
            refused = client.request(method, f"/api/{name}", json={"model": "llama3"})
            assert refused.status_code == 404 and "--model" in refused.json()["error"]


# --- chats and completions -----------------------------------------------------------------

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
GREEDY = {"temperature": 0}


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("}\n")
    return [json.loads(line) for line in answer.text.splitlines()]


def chat(worker: WorkerProcess, **fields: Any) -> httpx.Response:
    return worker.post("/api/chat", {"model": NAME, "messages": FRANCE, "options": GREEDY} | fields)


def generate(worker: WorkerProcess, **fields: Any) -> httpx.Response:
    return worker.post("/api/generate", {"model": NAME, "options": GREEDY} | fields)


def check_end(end: dict[str, Any], reason: str) -> None:
    assert (end["done"], end["done_reason"]) == (True, reason)
    names = ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"]
    assert all(type(end[name]) is int and end[name] >= 0 for name in names)
    assert end["total_duration"] > end["eval_duration"] > 1000, "in nanoseconds"
    assert end["prompt_eval_count"] > 0 and end["eval_count"] > 0


def test_a_chat_is_streamed_unless_stream_is_false(worker: WorkerProcess) -> None:
    *parts, last = lines_of(chat(worker))
    whole = chat(worker, stream=False).json()
    assert "".join(part["message"]["content"] for part in parts) == PARIS
    assert whole["message"] == {"role": "assistant", "content": PARIS}
    for part in (*parts, last, whole):
        assert part["model"] == NAME and part["message"]["role"] == "assistant"
        assert datetime.fromisoformat(part["created_at"]).tzinfo is not None
    assert not any(part["done"] for part in parts) and last["message"]["content"] == ""
    for end in (last, whole):
        check_end(end, "stop")
    assert last["eval_count"] == whole["eval_count"]
    check_end(chat(worker, stream=False, options=GREEDY | {"num_predict": 2}).json(), "length")


def test_a_last_message_of_the_assistant_is_continued(worker: WorkerProcess) -> None:
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of"}]
    assert (
        chat(worker, messages=begun, stream=False).json()["message"]["content"]
        == " France is Paris."
    )
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert chat(worker, messages=[*FRANCE, called], stream=False).status_code == 200


def test_options_are_honoured_or_named(worker: WorkerProcess) -> None:
    options = GREEDY | {"stop": [" Par"], "num_ctx": 512, "num_gpu": 1, "mirostat": 0}
    answer = chat(worker, stream=False, options=options, keep_alive="5m")
    assert answer.json()["message"]["content"] == "The capital of France is"
    assert answer.json()["done_reason"] == "stop"
    ignored = sorted(answer.headers["x-ignored-fields"].split(", "))
    assert ignored == ["keep_alive", "options.num_ctx", "options.num_gpu"]
    seeded = [
        chat(worker, stream=False, options={"seed": 7, "temperature": 1.5}).json()["message"]
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1]


def test_a_prompt_goes_into_the_template_unless_it_is_raw(worker: WorkerProcess) -> None:
    question = FRANCE[0]["content"]
    *parts, last = lines_of(generate(worker, prompt=question))
    assert "".join(part["response"] for part in parts) == PARIS and last["response"] == ""
    check_end(last, "stop")
    whole = generate(worker, prompt=question, system="Be brief.", stream=False).json()
    assert whole["prompt_eval_count"] > last["prompt_eval_count"]
    chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    raw = generate(worker, prompt=chat, raw=True, stream=False).json()
    assert raw["response"] == PARIS and raw["prompt_eval_count"] == last["prompt_eval_count"]
    assert generate(worker, prompt=chat, raw=True, system="a").status_code == 400


def test_an_empty_request_loads_or_unloads_the_model(worker: WorkerProcess) -> None:
    for stream in (True, False):
        loaded = chat(worker, messages=[], stream=stream).json()
        assert loaded["done"] and loaded["done_reason"] == "load"
        assert loaded["message"] == {"role": "assistant", "content": ""}
        unloaded = generate(worker, keep_alive=0, stream=stream)
        assert unloaded.json()["done_reason"] == "unload" and unloaded.json()["response"] == ""
        assert unloaded.headers["x-ignored-fields"] == "keep_alive", "it stays loaded"
    for keep_alive, reason in (("0", "unload"), ("0s", "unload"), ("5m", "load"), (-1, "load")):
        found = chat(worker, messages=[], keep_alive=keep_alive).json()
        assert found["done_reason"] == reason, keep_alive


SIZE = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}


def test_an_answer_follows_its_format(worker: WorkerProcess) -> None:
    by_schema = chat(worker, format=SIZE, stream=False).json()
    assert json.loads(by_schema["message"]["content"])["size"] in (1, 2)
    options = GREEDY | {"num_predict": 400}
    as_json = generate(worker, prompt="Hi", format="json", options=options, stream=False).json()
    assert as_json["done_reason"] == "stop" and isinstance(json.loads(as_json["response"]), dict)
    assert chat(worker, format="").status_code == 200


def test_log_probabilities_come_with_their_tokens(worker: WorkerProcess) -> None:
    *parts, _ = lines_of(chat(worker, logprobs=True, top_logprobs=2))
    whole = chat(worker, logprobs=True, top_logprobs=2, stream=False).json()
    streamed = [entry for part in parts for entry in part.get("logprobs", [])]
    assert streamed == whole["logprobs"]
    assert "".join(entry["token"] for entry in streamed) == PARIS
    for entry in streamed:
        assert len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]


# --- embeddings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "field", "found"),
    [("/api/embed", "input", "embeddings"), ("/api/embeddings", "prompt", "embedding")],
)
def test_a_model_that_makes_no_embeddings_says_so(
    worker: WorkerProcess, path: str, field: str, found: str
) -> None:
    refused = worker.post(path, {"model": NAME, field: "a"})
    assert refused.status_code == 400 and "embeddings" in refused.json()["error"]
    fields = {"keep_alive": "5m", "options": {"num_ctx": 8}, "truncate": True}
    loaded = worker.post(path, {"model": NAME, field: "", **fields})
    assert loaded.status_code == 200 and loaded.json()[found] == []
    ignored = loaded.headers["x-ignored-fields"].split(", ")
    assert set(ignored) - {"truncate"} == {"keep_alive", "options.num_ctx"}
    assert ("truncate" in ignored) == (path == "/api/embeddings")


# --- the form ----------------------------------------------------------------------------


def test_the_dialect_is_one_folder_and_one_line() -> None:
    folder = ROOT / "worker" / "api" / "dialects" / "ollama"
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted(Path(ROOT, "worker").rglob("*.py"))
        if folder not in path.parents
        for line in path.read_text("utf-8").splitlines()
        if "ollama" in line.lower()
    ]
    assert lines == ['worker/api/app.py: "ollama",']
