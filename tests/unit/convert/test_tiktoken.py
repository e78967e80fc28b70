"""Kimi's kind of tokenizer, a `tiktoken.model`, against the tiktoken library's own ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.convert.test_parity import DATA as PARITY
from tests.unit.convert.test_tokenizers import ids, load
from worker.commands import convert as cli
from worker.convert.checkpoint import Checkpoint
from worker.convert.tokenizer import ranked
from worker.convert.tokenizer.read import read_vocabulary
from worker.errors import ModelError

DATA = Path(__file__).parents[2] / "data/tiktoken"
KIMI = {"model_type": "kimi_k2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "kimi"))


def test_ids_equal_those_of_tiktoken(folder: Path) -> None:
    model = load(folder, KIMI, 700)
    for text, expected in json.loads((DATA / "expected.json").read_text("utf-8")):
        assert ids(model, text) == expected, text
    assert model.metadata("tokenizer.ggml.pre") == "kimi-k2"
    assert model.bos == 656 and 657 in model.eog
    model.close()


def test_a_checkpoint_with_it_is_converted(tmp_path: Path, folder: Path) -> None:
    source, target = tmp_path / "Moonlight", tmp_path / "model.gguf"
    shutil.copytree(PARITY / "deepseek-v3", source)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(folder / name, source)
    config = json.loads((source / "config.json").read_text())
    assert config["vocab_size"] < 660  # The table of the small model has too few rows.
    arguments = [str(source), str(target), "--progress", "none"]
    assert cli.run(arguments) == 3
    lines = (source / "tiktoken.model").read_text().splitlines(keepends=True)
    (source / "tiktoken.model").write_text("".join(lines[:280]))
    settings = {"eos_token": "[EOS]", "added_tokens_decoder": {"280": {"content": "[EOS]"}}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert cli.run(arguments) == 0


def test_an_unknown_split_and_a_damaged_file_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="only Python code"):
        read_vocabulary(Checkpoint(folder, {"model_type": "qwen"}, {}), 700)
    (folder / "tiktoken.model").write_text("IQ== 0\nIQ=\n")
    with pytest.raises(ModelError, match="line 2"):
        read_vocabulary(Checkpoint(folder, KIMI, {}), 700)


def test_merges_follow_the_ranks() -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"abc": 4, b"abcbc": 5, b"ca": 7}
    pairs = [(b"b", b"c"), (b"a", b"bc"), (b"abc", b"bc"), (b"c", b"a")]
    assert ranked.merges(ranks) == pairs
