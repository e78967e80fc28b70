"""Real vocabularies, rebuilt as in checkpoints, against the vectors that ship with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from builds import sdist
from builds.errors import BuildError
from builds.pins import pins
from tests.unit.convert import rebuild
from worker.convert import prepare
from worker.convert.checkpoint import Checkpoint
from worker.convert.output import write_layout
from worker.convert.prepare import Conversion, Options
from worker.convert.tokenizer.check import TokenCheck
from worker.convert.tokenizer.read import read_vocabulary
from worker.llama.model import LoadOptions, Model

LONG = pytest.mark.long
CASES = [
    ("gpt-2", "gpt-2"),
    ("llama-spm", "tokenizer.json"),
    ("llama-spm", "tokenizer.model"),
    pytest.param("llama-bpe", "llama-bpe", marks=LONG),
    pytest.param("qwen2", "qwen2", marks=LONG),
    pytest.param("gemma-4", "tokenizer.json", marks=LONG),
    pytest.param("starcoder", "starcoder", marks=LONG),
    pytest.param("deepseek-coder", "deepseek-coder", marks=LONG),
    pytest.param("deepseek-llm", "deepseek-llm", marks=LONG),
    pytest.param("command-r", "starcoder", marks=LONG),
    pytest.param("qwen35", "qwen35", marks=LONG),
    pytest.param("phi-3", "tokenizer.json", marks=LONG),
    pytest.param("falcon", "falcon", marks=LONG),
    pytest.param("mpt", "gpt-2", marks=LONG),
    pytest.param("refact", "starcoder", marks=LONG),
]


@pytest.fixture(scope="module")
def shipped() -> Path:
    """Return the vocabularies in the pinned sources of llama.cpp."""
    try:
        return sdist.unpacked(pins()) / "vendor/llama.cpp/models"
    except BuildError as error:
        pytest.skip(f"the pinned sources are not to be had here: {error}")


@pytest.mark.parametrize(("name", "form"), CASES)
def test_tokens_equal_the_shipped_vectors(
    shipped: Path, tmp_path: Path, name: str, form: str
) -> None:
    source = rebuild.Source(shipped / f"ggml-vocab-{name}.gguf")
    if form == "tokenizer.json":
        rebuild.write_sentencepiece_json(source, tmp_path)
    elif form == "tokenizer.model":
        rebuild.write_model(source, tmp_path)
    else:
        rebuild.write_byte_level(source, form, tmp_path)
    architecture = "gemma4" if name == "gemma-4" else "llama"
    made = Conversion(Checkpoint(tmp_path, {}, {}), Options(), architecture, {}, [])
    vocabulary = read_vocabulary(made.checkpoint, len(source.tokens))
    prepare._add_vocabulary(made, vocabulary, embeds=False)
    kinds = {
        "gemma-4": "gemma4",
        "llama-spm": "llama",
        "phi-3": "llama",
    }  # As llama.cpp's script.
    assert made.metadata["tokenizer.ggml.model"] == kinds.get(name, "gpt2")
    with TokenCheck(tmp_path) as tokens:
        assert tokens.check(architecture, made.metadata).n_texts > 50

    target = tmp_path / "vocabulary.gguf"
    write_layout(target, architecture, made.metadata)
    model = Model(str(target), LoadOptions(vocab_only=True))
    vectors = rebuild.vectors(shipped, name)
    got = [model.tokenize(text, add_special=False, parse_special=False) for text, _ in vectors]
    model.close()
    assert got == [ids for _, ids in vectors]
