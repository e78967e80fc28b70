"""The bundled checkpoint through the converter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.unit.convert import engine, files
from worker.llama.model import Model

MODEL = Path(__file__).parents[3] / "worker/assets/tiny-model"
GREEDY = Path(__file__).parents[2] / "data/expected_greedy.json"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "bf16.gguf"
    return files.converted(MODEL, target, "--outtype", "bf16")


@pytest.fixture(scope="module")
def vocabulary(converted: Path) -> Iterator[Model]:
    model = engine.vocabulary(converted)
    yield model
    model.close()


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(GREEDY.read_text())["cases"]
    return found


def test_bf16_weights_are_the_source_bit_for_bit(converted: Path) -> None:
    header, data = files.read(MODEL / "model.safetensors")
    source = data[slice(*header["model.layers.2.mlp.down_proj.weight"]["data_offsets"])]
    tensors = {t.name: t for t in gguf.GGUFReader(converted).tensors}
    assert tensors["blk.2.ffn_down.weight"].data.tobytes() == source


def test_tokens_equal_the_reference(vocabulary: Model) -> None:
    for case in cases():
        text = case["prompt"] if "prompt" in case else case["rendered"]
        ids = vocabulary.tokenize(text, add_special=True, parse_special=True)
        assert ids == case["prompt_token_ids"]


def test_every_end_of_generation_id_and_the_template_are_carried(vocabulary: Model) -> None:
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert set(generation["eos_token_id"]) <= vocabulary.eog
    assert vocabulary.bos == generation["bos_token_id"] and vocabulary.adds_bos
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    assert vocabulary.chat_template() == config["chat_template"]
    assert vocabulary.metadata("tokenizer.ggml.pre") == "gpt-2"
