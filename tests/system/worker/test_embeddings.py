"""A model with pooling is served only for embeddings."""

from __future__ import annotations

import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import openai
import pytest
import tokenizers

from tests.conftest import StartWorker
from tests.support.bundled import bundled_pooling
from tests.support.pool_manager import serving
from tests.support.random_adapters import random_adapters
from tests.support.worker import WorkerProcess
from tests.unit.convert import engine
from tests.unit.convert.test_reranker import converted, reranker

QUERY = "What do foxes eat"
DOCUMENTS = ["The fox ate a rabbit.", "Paris.", "A rabbit ate the fox and the fox ran.", ""]
LONG = "The fox ran. " * 900
"""More tokens than these models accept."""


@pytest.fixture(scope="module")
def pooling_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with mean pooling declared, with the same weights."""
    return bundled_pooling(tmp_path_factory.mktemp("pooling") / "pooling.gguf")


@pytest.fixture(scope="module")
def pooling(pooling_gguf: Path, share_worker: StartWorker) -> WorkerProcess:
    return share_worker("--model", str(pooling_gguf))


def test_openais_client_gets_normalised_vectors(pooling: WorkerProcess) -> None:
    texts = ["The fox loved to dance.", "What is 3 plus 4?", "The fox loved to dance."]
    with openai.OpenAI(base_url=f"{pooling.base_url}/v1", api_key="any", max_retries=0) as client:
        answer = client.embeddings.create(model="pooling", input=texts, encoding_format="float")
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        fox, question, again = (entry.embedding for entry in answer.data)
        assert len(fox) == 256
        assert sum(x * x for x in fox) == pytest.approx(1.0, abs=1e-5)
        assert fox == pytest.approx(again, abs=1e-4) and fox != question
        assert answer.usage.prompt_tokens > 20
        packed = client.embeddings.create(model="pooling", input=texts[0])
        assert packed.data[0].embedding == pytest.approx(fox, abs=1e-4)
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            client.completions.create(model="pooling", prompt="Once")
    refused = pooling.post("/execute", {"job_id": "a", "prompt": "Once upon a time"})
    assert refused.status_code == 400
    assert pooling.get("/info").json()["model"]["pooling"] == "mean"


def test_many_texts_at_once_have_the_vectors_of_each_alone(pooling: WorkerProcess) -> None:
    """Each vector is as if computed alone, and the worker answers others meanwhile."""
    texts = [f"{'The fox ran. ' * (n % 7)}{n}" for n in range(510)] + ["", "The fox ran. " * 90]

    def embedded(**fields: Any) -> Any:
        return pooling.answer("/v1/embeddings", fields)

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(embedded, input=texts)
        slowest = 0.0
        while not pending.done():
            began = time.monotonic()
            assert pooling.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            time.sleep(0.02)
        many = pending.result()
    assert slowest < 30
    vectors = [entry["embedding"] for entry in many["data"]]
    assert len(vectors) == 512
    for index in (0, 1, 6, 400, 510, 511):
        [alone] = embedded(input=texts[index])["data"]
        assert sum(a * b for a, b in zip(alone["embedding"], vectors[index], strict=True)) > 0.9999
    short = embedded(input=texts[:2], dimensions=8)["data"]
    assert [len(entry["embedding"]) for entry in short] == [8, 8]
    norm = math.hypot(*vectors[0][:8])
    assert short[0]["embedding"] == pytest.approx([x / norm for x in vectors[0][:8]], abs=1e-4)
    for norm, size in ((-1, lambda cut: 1.0), (0, lambda cut: max(map(abs, cut)) / 32760)):
        (whole,) = embedded(input=texts[0], embd_normalize=norm)["data"]
        (cut,) = embedded(input=texts[0], embd_normalize=norm, dimensions=8)["data"]
        first = whole["embedding"][:8]
        expected = [x / size(first) for x in first]
        assert cut["embedding"] == pytest.approx(expected, rel=1e-3)
    unscaled = embedded(input=texts[0], embd_normalize=-1)["data"]
    assert embedded(input=texts[0], use_activation=False)["data"] == unscaled
    for fields in ({"embed_dtype": "float16"}, {"endianness": "big"}):
        refused = pooling.post("/v1/embeddings", {"input": "a", **fields})
        assert refused.status_code == 400 and refused.json()["error"]["param"] in fields
    too_many = pooling.post("/v1/embeddings", {"input": "a", "dimensions": 257})
    assert too_many.status_code == 400 and "256" in too_many.text


def test_embeddings_count_in_steps_and_decode_seconds(pooling: WorkerProcess) -> None:
    names = ("worker_engine_steps", "worker_engine_decode_seconds")
    before, began = [pooling.metric(name) for name in names], time.monotonic()
    assert pooling.post("/v1/embeddings", {"input": LONG[:300]}).status_code == 200
    pooling.wait_metric(names[0], before[0] + 1)
    assert 0 < pooling.metric(names[1]) - before[1] < time.monotonic() - began


def test_an_embedder_reports_one_slot(pooling: WorkerProcess) -> None:
    """Not the setting's, because texts to embed share one batch without slots of their own."""
    info = pooling.get("/info").json()
    assert info["limits"]["slots"] == info["engine"]["slots"] == 1


def test_ollamas_embeddings_are_the_same_vectors(pooling: WorkerProcess) -> None:
    texts = ["The fox ran.", "Paris."]
    entries = pooling.post("/v1/embeddings", {"input": texts}).json()
    vectors = [entry["embedding"] for entry in entries["data"]]
    both = pooling.post("/api/embed", {"model": "any", "input": texts}).json()
    assert both["embeddings"] == vectors and both["model"] == "pooling:latest"
    assert both["prompt_eval_count"] == entries["usage"]["prompt_tokens"]
    assert both["total_duration"] > 1000
    one = pooling.post("/api/embed", {"model": "any", "input": texts[0], "dimensions": 8}).json()
    assert [len(vector) for vector in one["embeddings"]] == [8]
    older = pooling.post("/api/embeddings", {"model": "any", "prompt": texts[1]}).json()
    assert older == {"embedding": pytest.approx(vectors[1], abs=1e-4)}
    shown = pooling.post("/api/show", {"model": "any"}).json()
    assert shown["capabilities"] == ["embedding"]
    body = {"model": "any", "input": [texts[0], LONG], "truncate": True}
    cut = pooling.post("/api/embed", body).json()
    assert cut["embeddings"][0] == pytest.approx(vectors[0], abs=1e-4)
    n_tokens = pooling.post("/v1/embeddings", {"input": texts[0]}).json()["usage"]["prompt_tokens"]
    assert cut["prompt_eval_count"] == n_tokens + 1024
    tokens = pooling.post("/tokenize", {"content": LONG, "add_special": True}).json()["tokens"]
    begun = pooling.post("/v1/embeddings", {"input": tokens[:1024]}).json()["data"][0]
    assert cut["embeddings"][1] == pytest.approx(begun["embedding"], abs=1e-4)


def test_vectors_are_computed_with_the_adapters_of_the_request(
    start_worker: StartWorker, pooling_gguf: Path
) -> None:
    """By its list, or by the adapter that its model names."""
    flags = [
        f"--lora={name}={file}"
        for name, file in zip("xy", random_adapters(pooling_gguf), strict=True)
    ]
    worker = start_worker("--model", str(pooling_gguf), *flags)

    def vector(path: str, **fields: Any) -> list[float]:
        answer = worker.post(path, {"model": "pooling", "input": "a", "prompt": "a", **fields})
        assert answer.status_code == 200, answer.text
        assert "lora" not in answer.headers.get("x-ignored-fields", "")
        (found,) = re.findall(r'"embedding[s"]*:[^-0-9]*([^]]+)', answer.text)
        return [float(number) for number in found.split(",")]

    for path in ("/v1/embeddings", "/embedding", "/api/embed", "/api/embeddings"):
        plain, x, y = (vector(path, model=name) for name in ("pooling", "x", "y"))
        assert sum(a * b for a, b in zip(x, y, strict=True)) < 0.9
        for lora, expected in (([], plain), ([{"id": "x", "scale": 1}], x)):
            assert vector(path, model="y", lora=lora) == pytest.approx(expected, abs=1e-4)
        unknown = {"model": "y", "input": "a", "prompt": "a", "lora": [{"id": 2, "scale": 1}]}
        refused = worker.post(path, unknown)
        assert refused.status_code == 400 and "lora[0].id" in refused.text


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embedding", "/api/embed"])
def test_fields_of_generation_are_ignored_by_name(pooling: WorkerProcess, path: str) -> None:
    body = {"model": "pooling", "input": "The fox ran."}
    of_texts = {"temperature": 0.5, "stop": ["x"], "tools": [], "max_tokens": 5, "stream": True}
    plain, answer = pooling.post(path, body), pooling.post(path, body | of_texts)
    assert set(answer.headers["x-ignored-fields"].split(", ")) == of_texts.keys()
    assert len(answer.content) > 1000 and "x-ignored-fields" not in plain.headers


def test_input_wins_over_content(pooling: WorkerProcess) -> None:
    """And so does its format, as in llama-server."""
    answer = pooling.post("/v1/embeddings", {"input": "The fox ran.", "content": "Paris."})
    assert answer.headers["x-ignored-fields"] == "content"
    both = answer.json()
    alone = pooling.post("/v1/embeddings", {"input": "The fox ran."}).json()
    assert both["data"][0]["embedding"] == pytest.approx(alone["data"][0]["embedding"], abs=1e-4)


# --- ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]"),
        ("/embedding", {"content": ["a", "b", LONG]}, "content[2]"),
        ("/api/embed", {"input": ["a", LONG]}, "input[1]"),
        ("/api/embed", {"input": LONG, "truncate": False}, "input"),
        ("/api/embeddings", {"prompt": LONG}, "prompt"),
    ],
)
def test_a_text_that_is_too_long_is_named(
    pooling: WorkerProcess, path: str, body: dict[str, Any], place: str
) -> None:
    answer = pooling.post(path, {"model": "pooling", **body})
    assert answer.status_code == 400 and f"{place}: it has" in answer.text


def start_announced(start: StartWorker, capability: str, *flags: str) -> WorkerProcess:
    """Start a worker that must report exactly this capability to its pool manager."""
    with serving() as manager:
        worker = start(*flags, *manager.heartbeat_flags())
        manager.wait_for_status("ready")
        assert manager.beats[-1].payload["capabilities"] == [capability]
    return worker


def test_any_context_length_is_served(start_worker: StartWorker, pooling_gguf: Path) -> None:
    """Even one that the texts of a decode cannot share evenly."""
    flags = ("--model", str(pooling_gguf), "--context-length", "100")
    worker = start_announced(start_worker, "embedding", *flags)
    longest = worker.post("/v1/embeddings", {"input": [[5] * 100, [5] * 3]})
    assert longest.status_code == 200 and longest.json()["usage"]["prompt_tokens"] == 103
    longer = worker.post("/v1/embeddings", {"input": [5] * 101})
    assert longer.status_code == 400 and "100 tokens" in longer.text


def test_documents_are_ranked(start_worker: StartWorker, tmp_path: Path) -> None:
    """With the model's own template; llama.cpp's classifier judges each prompt separately."""
    source = reranker(tmp_path, "Qwen3-Reranker-0.6B")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    target = converted(source)
    template = gguf.GGUFReader(target).fields["tokenizer.chat_template.rerank"].contents()
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    expected, n_tokens = [], 0
    for document in DOCUMENTS:
        prompt = template.replace("{query}", QUERY).replace("{document}", document)
        tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
        n_tokens += len(tokens)
        expected.append(engine.ranks(target, tokens, 2)[0])
    exact = ("--kv-type", "f32", "--flash-attention", "off")
    worker = start_announced(start_worker, "rerank", "--model", str(target), *exact)

    def ranked(path: str = "/v1/rerank", **fields: Any) -> Any:
        return worker.answer(path, {"query": QUERY, **fields})

    answer = ranked(documents=DOCUMENTS)
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-4)
    assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    objects = [{"text": d} for d in DOCUMENTS]
    best = ranked("/v2/rerank", documents=objects, top_n=2, return_documents=True)
    assert [r["document"]["text"] for r in best["results"]] == [DOCUMENTS[i] for i in order[:2]]
    tei = ranked("/rerank", texts=DOCUMENTS)
    assert [entry["index"] for entry in tei] == order and tei[0]["score"] == pytest.approx(
        expected[order[0]], abs=1e-4
    )
    body = {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    mixed = worker.post("/v1/rerank", body | {"texts": ["a"], "return_text": True})
    assert mixed.headers["x-ignored-fields"] == "texts, return_text"
    assert mixed.json() == worker.post("/v1/rerank", body).json()
    other = worker.post("/rerank", {"query": QUERY, "texts": ["a"], "return_documents": True})
    assert other.headers["x-ignored-fields"] == "return_documents" and len(other.json()) == 1
    no_embedding = worker.post("/v1/embeddings", {"input": "a"})
    assert no_embedding.status_code == 400 and "/v1/rerank" in no_embedding.text
    no_text = worker.post("/v1/completions", {"prompt": "a"})
    assert no_text.status_code == 400 and "ranks documents" in no_text.text
    wrongs: list[Any] = [
        {},
        {"documents": ["a"], "lora": [{"id": 0, "scale": 1}]},
        {"documents": []},
        {"documents": [1]},
        {"documents": ["a"], "top_n": 0},
        {"documents": ["a"], "instruction": "Find lies."},
    ]
    for wrong in wrongs:
        assert worker.post("/v1/rerank", {"query": "a", **wrong}).status_code == 400
    for place, fields in (
        ("documents[1]", {"documents": ["a", LONG]}),
        ("texts", {"texts": [LONG]}),
        ("query", {"query": LONG, "documents": ["a", "b"]}),
    ):
        answer = worker.post("/v1/rerank", {"query": "a", **fields})
        assert answer.status_code == 400 and f"{place}: it has" in answer.text


def test_a_model_that_embeds_ranks_nothing(pooling: WorkerProcess) -> None:
    answer = pooling.post("/v1/rerank", {"query": "a", "documents": ["b"]})
    assert answer.status_code == 400 and "/v1/embeddings" in answer.text
