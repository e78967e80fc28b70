"""RWKV's World vocabulary against the ids of the authors' own package, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.convert.test_failures import edit, fails
from tests.unit.convert.test_parity import checkpoint
from tests.unit.convert.test_tokenizers import ids, load
from worker.commands import convert as cli
from worker.convert.checkpoint import Checkpoint
from worker.convert.tokenizer.read import read_vocabulary
from worker.convert.tokenizer.rwkv import FILE
from worker.errors import ModelError

DATA = Path(__file__).parents[2] / "data/rwkv"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DATA / FILE, tmp_path)
    return tmp_path


def test_ids_are_the_authors(folder: Path) -> None:
    settings = {
        "eos_token": "\n\n",
        "added_tokens_decoder": {"0": {"content": "<|end|>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = load(folder, {}, 65536)
    for text, expected in json.loads((DATA / "expected.json").read_text("utf-8")):
        assert ids(model, text) == expected, text
        assert b"".join(model.piece(i) for i in expected) == text.encode()
    assert {0, 261} <= model.eog
    # No text is the end of a text, or a row that the model does not use.
    for text in ("<s>", "<|end|>", "[PAD65535]"):
        assert not {0, 65535} & set(ids(model, text))
    model.close()


def test_a_damaged_line_is_named(folder: Path) -> None:
    for line in ("256 b'\\xff' 2", "0 'a' 1", "7 open('x') 1", "x"):
        (folder / FILE).write_text(f"1 'a' 1\n{line}\n")
        with pytest.raises(ModelError, match="line 2 is not an id"):
            read_vocabulary(Checkpoint(folder, {}, {}), 65536)


def test_a_checkpoint_with_it_is_converted(tmp_path: Path) -> None:
    source = checkpoint("rwkv-7", tmp_path)
    (source / "tokenizer.json").unlink()
    tokens = [bytes([i]) for i in range(256)]
    lines = (f"{i} {token!r} 1\n" for i, token in enumerate(tokens, 1))
    (source / FILE).write_text("".join(lines))
    (source / "tokenizer_config.json").unlink()
    target = tmp_path / "model.gguf"
    assert cli.run([str(source), str(target), "--progress", "none"]) == 0
    assert cli.run(["verify", str(source), str(target), "--progress", "none"]) == 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("norm_eps", 1e-6, "head_dim times norm_eps"),
        ("value_dim", [64, 128], "value_dim"),
        ("attn", {"layers": [0]}, "attn"),
        ("hidden_act", "silu", "hidden_act"),
        ("a_low_rank_dim", None, "a_low_rank_dim"),
    ],
)
def test_what_llama_cpp_lacks_is_refused(
    tmp_path: Path, key: str, value: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("rwkv-7", tmp_path)
    edit(source / "config.json", **{key: value})
    assert words in fails(source, capsys)
