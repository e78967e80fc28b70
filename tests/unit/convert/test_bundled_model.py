"""The bundled checkpoint through the converter, against a forward pass that the test owns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.unit.convert import engine, files, forward
from tests.unit.convert.forward import Array
from worker.llama.model import Model

MODEL = Path(__file__).parents[3] / "worker/assets/tiny-model"
GREEDY = Path(__file__).parents[2] / "data/expected_greedy.json"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("converted")
    return {
        outtype: files.converted(MODEL, folder / f"{outtype}.gguf", "--outtype", outtype)
        for outtype in ("f32", "f16", "bf16", "q8_0")
    }


@pytest.fixture(scope="module")
def vocabulary(converted: dict[str, Path]) -> Iterator[Model]:
    model = engine.vocabulary(converted["bf16"])
    yield model
    model.close()


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(GREEDY.read_text())["cases"]
    return found


@pytest.mark.parametrize(("outtype", "tolerance"), [("f32", 1e-4), ("f16", 1e-2), ("q8_0", 0.5)])
def test_logits_equal_a_forward_pass_of_the_source(
    converted: dict[str, Path], outtype: str, tolerance: float
) -> None:
    for case in cases()[:4]:
        tokens = [*case["prompt_token_ids"], *case["token_ids"]][:96]
        compare(engine.logits(converted[outtype], tokens), forward.logits(MODEL, tokens), tolerance)


def test_bf16_logits_equal_a_forward_pass_with_bf16_inputs(converted: dict[str, Path]) -> None:
    for case in cases()[:4]:
        tokens = case["prompt_token_ids"]
        expected = forward.logits(MODEL, tokens, bf16_inputs=True)
        compare(engine.logits(converted["bf16"], tokens), expected, 2e-2)


def compare(got: Array, expected: Array, tolerance: float) -> None:
    assert np.abs(got - expected).max() <= tolerance
    top = np.sort(expected, axis=-1)
    clear = top[:, -1] - top[:, -2] > 2 * tolerance
    assert clear.any()
    assert (got.argmax(-1) == expected.argmax(-1))[clear].all()


def test_bf16_weights_are_the_source_bit_for_bit(converted: dict[str, Path]) -> None:
    _, weights = forward.load(MODEL)
    tensors = {t.name: t for t in gguf.GGUFReader(converted["bf16"]).tensors}
    source = weights["model.layers.2.mlp.down_proj.weight"].view(np.uint32) >> 16
    written = tensors["blk.2.ffn_down.weight"].data.view(np.uint16)
    assert (written == source.astype(np.uint16)).all()


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
