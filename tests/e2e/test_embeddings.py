"""A model that pools is served for embeddings, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import gguf
import openai
import pytest

from tests.conftest import StartWorker
from tests.support.bundled import bundled_gguf
from tests.support.worker import WorkerProcess


@pytest.fixture(scope="module")
def pooling_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with mean pooling declared: the same weights, another use."""
    source = gguf.GGUFReader(bundled_gguf("f32"))
    path = tmp_path_factory.mktemp("pooling") / "pooling.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def client_of(worker: WorkerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.base_url}/v1", api_key="any", max_retries=0)


def test_embeddings(start_worker: StartWorker, pooling_gguf: Path) -> None:
    worker = start_worker("--model", str(pooling_gguf))
    texts = ["The fox loved to dance.", "What is 3 plus 4?", "The fox loved to dance."]
    with client_of(worker) as client:
        answer = client.embeddings.create(model="pooling", input=texts, encoding_format="float")
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        fox, question, again = (entry.embedding for entry in answer.data)
        assert len(fox) == 256
        assert sum(x * x for x in fox) == pytest.approx(1.0, abs=1e-5)
        assert fox == again and fox != question
        assert answer.usage.prompt_tokens > 20
        packed = client.embeddings.create(model="pooling", input=texts[0])
        assert packed.data[0].embedding == pytest.approx(fox, abs=1e-6)
        with pytest.raises(openai.BadRequestError, match="embeddings"):
            client.completions.create(model="pooling", prompt="Once")
    refused = worker.post("/execute", {"job_id": "a", "prompt": "Once upon a time"})
    assert refused.status_code == 400
    assert worker.get("/info").json()["model"]["pooling"] == "mean"


def test_a_model_that_generates_makes_no_embeddings(worker: WorkerProcess) -> None:
    with client_of(worker) as client, pytest.raises(openai.BadRequestError, match="embedding"):
        client.embeddings.create(model="tiny-model", input="Once")
