"""Ollama's API on the real process, and that a dialect is one folder and one line."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from tests.conftest import StartWorker
from tests.support.worker import ROOT, WorkerProcess

NAME = "tiny-model:latest"


# --- the model ---------------------------------------------------------------------------


def test_the_model_is_listed_with_a_tag(worker: WorkerProcess) -> None:
    [listed] = worker.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == NAME
    assert listed["size"] > 2_000_000 and re.fullmatch("[0-9a-f]{64}", listed["digest"])
    assert datetime.fromisoformat(listed["modified_at"]).tzinfo is not None
    details = listed["details"]
    assert (details["format"], details["family"], details["families"]) == (
        "gguf",
        "llama",
        ["llama"],
    )
    assert details["parameter_size"] == "2.62M"
    [running] = worker.get("/api/ps").json()["models"]
    assert running["name"] == NAME and running["digest"] == listed["digest"]
    assert running["context_length"] == 1024 and running["size_vram"] == 0  # no GPU holds it
    assert datetime.fromisoformat(running["expires_at"]).year > 2100, "it stays loaded"


@pytest.mark.parametrize("field", ["model", "name"])
def test_what_is_shown_of_the_model(worker: WorkerProcess, field: str) -> None:
    shown = worker.post("/api/show", {field: NAME, "verbose": False}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 1024
    assert shown["model_info"]["general.parameter_count"] > 2_000_000
    assert "<|im_start|>" in shown["template"]
    assert re.search(r"^temperature +0\.8$", shown["parameters"], re.MULTILINE)


def test_the_version_is_one_that_clients_take(worker: WorkerProcess) -> None:
    parts = worker.get("/api/version").json()["version"].split(".")
    assert [int(part) for part in parts] >= [0, 6, 0]


def test_ollamas_own_client_finds_somebody_there(start_worker: StartWorker) -> None:
    for flags, text in ((["--no-page"], "Ollama is running"), ([], "<!doctype html>")):
        worker = start_worker(*flags)
        assert httpx.head(worker.base_url).status_code == 200
        assert httpx.get(worker.base_url).text.startswith(text)


def test_a_name_is_taken_with_and_without_its_tag(start_worker: StartWorker) -> None:
    worker = start_worker("--served-model-name", "tiny", "--served-model-name", "fox:7b")
    names = [each["name"] for each in worker.get("/api/tags").json()["models"]]
    assert names == ["tiny:latest", "fox:7b"]
    for name in ("tiny", "tiny:latest", "fox:7b"):
        assert worker.post("/api/show", {"model": name}).status_code == 200
    for name in ("fox", "fox:latest", "tiny:7b"):
        refused = worker.post("/api/show", {"model": name})
        assert refused.status_code == 404 and refused.json().keys() == {"error"}


# --- embeddings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "given", "found"),
    [("/api/embed", "input", "embeddings"), ("/api/embeddings", "prompt", "embedding")],
)
def test_a_model_that_makes_no_embeddings_says_so(
    worker: WorkerProcess, path: str, given: str, found: str
) -> None:
    refused = worker.post(path, {"model": NAME, given: "a"})
    assert refused.status_code == 400 and "embeddings" in refused.json()["error"]
    fields = {"keep_alive": "5m", "options": {"num_ctx": 8}, "truncate": True}
    loaded = worker.post(path, {"model": NAME, given: "", **fields})
    assert loaded.status_code == 200 and loaded.json()[found] == []
    ignored = loaded.headers["x-ignored-fields"].split(", ")
    assert sorted(ignored) == ["keep_alive", "options.num_ctx", "truncate"]


# --- the form ----------------------------------------------------------------------------


def test_what_is_not_there_is_told_in_its_form(worker: WorkerProcess) -> None:
    for answer in (worker.get("/api/blobs/x"), worker.post("/api/pull", {"model": "a"})):
        assert answer.status_code == 404 and answer.json().keys() == {"error"}


def test_the_dialect_is_one_folder_and_one_line() -> None:
    folder = ROOT / "worker" / "api" / "dialects" / "ollama"
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted(Path(ROOT, "worker").rglob("*.py"))
        if folder not in path.parents
        for line in path.read_text("utf-8").splitlines()
        if "ollama" in line.lower()
    ]
    assert lines == ['worker/api/app.py: "ollama.routes",']
