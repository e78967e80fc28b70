"""Every family: our F32 GGUF in llama.cpp against the logits that transformers gives its source."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.convert import drawn, engine
from worker.commands import convert as cli

DATA = Path(__file__).parents[1] / "data/parity"
MODELS = sorted(p.name for p in DATA.iterdir() if p.name != "tokenizer")
LOOSE = {"gemma", "gemma-2", "gemma-3", "starcoder-2", "phi-2"}
LOOSE |= {"bert", "xlm-roberta", "modern-bert", "gemma-4", "gemma-4-moe", "gemma-3n"}
LOOSE |= {"embedding-gemma", "gemma-3n-shared"}
"""llama.cpp rounds their soft-capping, the scale of their embedding and GELU."""


def checkpoint(name: str, folder: Path) -> Path:
    """A committed checkpoint together with the tokenizer that all of them share."""
    shutil.copytree(DATA / name, folder / name)
    shutil.copytree(DATA / "tokenizer", folder / name, dirs_exist_ok=True)
    if (folder / name / drawn.SHAPES).is_file():
        drawn.write(folder / name)
    return folder / name


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = np.load(DATA / name / "expected.npz")
    source, target = checkpoint(name, tmp_path), tmp_path / "model.gguf"
    assert cli.run([str(source), str(target), "--outtype", "f32", "--progress", "none"]) == 0
    tokens, tolerance = expected["tokens"].tolist(), 3e-3 if name in LOOSE else 1e-4
    if "vector" in expected:
        got, wanted = engine.embedding(target, tokens), expected["vector"]
        assert got @ wanted >= 0.9999 * np.linalg.norm(got) * np.linalg.norm(wanted)
    else:
        got, wanted = engine.logits(target, tokens), expected["logits"]
        assert (got.argmax(-1) == wanted.argmax(-1)).all()
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()
