"""`prepare` on the published `config.json` of many models, with all their tensors.

Names and shapes are those that transformers saves for the configuration (`tensors.json`); the
weights are holes in a sparse file.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.convert import published
from tests.convert.test_definitions import DATA
from tests.convert.test_parity import DATA as PARITY
from worker.convert.prepare import Options, prepare
from worker.errors import ModelError

CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "published.json").read_text())
TENSORS: dict[str, dict[str, list[Any]]] = json.loads((DATA / "tensors.json").read_text())
NOT_TEXT = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|vision_model|visual|pooler|mtp)\..*"
)
ARCHITECTURES = {
    "BertModel": "bert",
    "CohereForCausalLM": "command-r",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "GptOssForCausalLM": "gpt-oss",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "StableLmForCausalLM": "stablelm",
}
"""llama.cpp's names."""


TOKENIZERS = {128256: DATA / "llama3_1", 151936: DATA / "qwen3", 152064: DATA / "qwen3"}
"""By size of the vocabulary; that of the parity models stands in for others."""


def numbers(text: str) -> Iterator[int]:
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def tensors(model: str) -> dict[str, tuple[int, ...]]:
    return {
        pattern.format(*at): tuple(shape)
        for pattern, groups in TENSORS[model].items()
        for shape, axes in groups
        for at in product(*map(numbers, axes))
    }


@pytest.mark.parametrize("model", list(TENSORS))
def test_a_published_model_is_recognised_and_complete(tmp_path: Path, model: str) -> None:
    config, found = CONFIGS[model], tensors(model)
    folder = tmp_path / model
    tokenizer = TOKENIZERS.get(config.get("vocab_size", 0), PARITY / "tokenizer")
    shutil.copytree(tokenizer, folder)
    published.write(folder, config, found.items())
    conversion = prepare(folder, Options(outtype="bf16"))
    conversion.checkpoint.close()
    assert conversion.architecture == ARCHITECTURES[config["architectures"][0]]
    wanted = sum(math.prod(s) for name, s in found.items() if not NOT_TEXT.fullmatch(name))
    made = {t.name: math.prod(t.shape) for t, _ in conversion.tensors if t.pieces}
    assert sum(made.values()) == wanted


def test_the_others_are_refused_by_name(tmp_path: Path) -> None:
    (model,) = CONFIGS.keys() - TENSORS.keys()
    published.write(tmp_path, CONFIGS[model], [("model.norm.weight", (16384,))])
    with pytest.raises(ModelError, match="quantised by fbgemm_fp8"):
        prepare(tmp_path, Options())
