"""`--override-kv`, `--pooling` and `--control-vector` on the real process: their changes are
reported and planned, and settings without an effect are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import StartWorker
from tests.support.bundled import bundled_gguf
from tests.support.random_adapters import random_control_vector
from tests.support.worker import run_to_exit
from worker.models.gguf.header import read_header


def test_changed_metadata_and_control_vectors_are_reported_and_planned(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    file = bundled_gguf("f32")
    vector = random_control_vector(file, tmp_path / "v.gguf", 0)
    override = "general.name=str:a, b,{arch}.context_length=int:512"
    steered = ("--control-vector", f"{vector}:0.5")
    worker = start_worker("--model", str(file), "--override-kv", override, *steered)
    info, header = worker.get("/info").json(), read_header(file)
    model, layers = info["model"], header.block_count or 0
    assert model["overridden"] == {"general.name": "a, b", "llama.context_length": 512}
    assert (model["name"], model["trained_context_length"]) == ("a, b", 512)
    assert model["metadata"]["llama.context_length"] == 512
    added = info["engine"]["plan"]["weights"] - header.tensor_bytes
    assert added >= 4 * (layers - 1) * model["embedding_length"]
    control = model["control"]
    assert control["vectors"] == [{"path": "v.gguf", "scale": 0.5}]
    assert control["layers"] == [1, layers - 1] and len(control["sha256"]) == 64


def test_control_vectors_without_effect_are_refused(tmp_path: Path, warm_cache: Path) -> None:
    file = bundled_gguf("f32")
    vector = random_control_vector(file, tmp_path / "v.gguf", 0)
    flags = ("--model", str(file), "--control-vector", f"{vector}:1e-30")
    ended = run_to_exit("--port", "0", *flags, cache_dir=warm_cache)
    assert (ended.code, "Traceback" in ended.stderr) == (3, False)
    assert "change nothing" in ended.sentence


def test_without_pooling_each_token_has_an_embedding(start_worker: StartWorker) -> None:
    worker = start_worker("--outtype", "f32", "--pooling", "none")
    tokens = [0, 100, 101]
    (answer,) = worker.post("/embedding", {"content": tokens}).json()
    assert len(answer["embedding"]) == 3 and len({json.dumps(v) for v in answer["embedding"]}) == 3
    both = worker.post("/embeddings", {"input": [tokens, tokens[:2]]}).json()
    assert [len(each["embedding"]) for each in both] == [3, 2]
    for mine, alone in zip(both[0]["embedding"], answer["embedding"], strict=True):
        assert mine == pytest.approx(alone, abs=1e-4)
    refused = worker.post("/v1/embeddings", {"input": "a"})
    assert refused.status_code == 400 and "/embedding" in refused.text
    refused = worker.post("/embeddings", {"input": [5, 1024]})
    assert refused.json()["error"]["param"] == "input"
    assert worker.metric("worker_kv_cells_total") == 1024, "a text's, which all share"
    assert "curl" not in worker.stdout, "it writes no story"
