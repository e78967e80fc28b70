"""Every family: our F32 GGUF in llama.cpp against transformers' logits of its source."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.unit.convert import engine, files
from worker.convert import architectures
from worker.convert.config import Config
from worker.convert.family.rules import Family
from worker.convert.prepare import Options, prepare

DATA = Path(__file__).parents[2] / "data/parity"
MODELS = sorted(p.name for p in DATA.iterdir() if p.name != "tokenizer")
GENERATING = [name for name in MODELS if "logits" in np.load(DATA / name / "expected.npz")]
"""Checkpoints that generate text."""
LOOSE = {"gemma", "gemma-2", "gemma-3", "starcoder-2", "phi-2"}
LOOSE |= {
    "bert",
    "xlm-roberta",
    "bert-ranker",
    "xlm-roberta-ranker",
    "modern-bert",
    "gemma-4",
    "gemma-4-moe",
    "embedding-gemma",
}
"""llama.cpp rounds their soft-capping, embedding scale and GELU."""


def checkpoint(name: str, folder: Path) -> Path:
    """A committed checkpoint with the tokenizer that all of them share."""
    shutil.copytree(DATA / name, folder / name)
    shutil.copytree(DATA / "tokenizer", folder / name, dirs_exist_ok=True)
    return folder / name


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    expected = np.load(DATA / name / "expected.npz")
    source = checkpoint(name, tmp_path)
    target = files.converted(source, tmp_path / "model.gguf", "--outtype", "f32")
    got, wanted = engine.answers(target, expected)
    if "vector" in expected:
        assert got @ wanted >= 0.9999 * np.linalg.norm(got) * np.linalg.norm(wanted)
    elif "logits" in expected:
        assert (got.argmax(-1) == wanted.argmax(-1)).all()
    tolerance = 3e-3 if name in LOOSE else 1e-4
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("name", GENERATING)
def test_repacked_weights_have_the_logits_of_stored_ones(name: str, tmp_path: Path) -> None:
    """llama.cpp ends the process if a repacked type lacks an operation."""
    expected = np.load(DATA / name / "expected.npz")
    target = files.converted(
        checkpoint(name, tmp_path), tmp_path / "model.gguf", "--outtype", "q8_0"
    )
    stored, repacked = (
        engine.logits(target, expected["tokens"].tolist(), repacked=each) for each in (False, True)
    )
    apart = np.abs(repacked - stored).max(1)  # rounding may choose other experts for a token
    assert np.median(apart) <= 0.03 * np.abs(stored).max()


def test_every_family_has_a_checkpoint() -> None:
    """Or is the text part of one with a checkpoint, with the same tensors under longer names."""
    configs = [json.loads((DATA / name / "config.json").read_text()) for name in MODELS]
    shown = [architectures.family_of(Config(config)) for config in configs]
    without = [f.names for f in architectures.FAMILIES if f not in shown and not f.section]
    assert [names for names in without if names] == [], (
        "worker/convert/README.md says how one is made"
    )


def test_every_checkpoint_has_its_row_in_the_readme() -> None:
    table = (Path(architectures.__file__).parents[1] / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w.-]+) \| [\w-]+ \| \d+ \|", table, re.MULTILINE)
    assert rows == MODELS, "tools/bench/convert_families.py writes them"


@pytest.mark.parametrize("family", [f for f in architectures.FAMILIES if f.section])
def test_a_text_part_has_the_tensors_of_the_model_alone(family: Family, tmp_path: Path) -> None:
    """Under a longer prefix, beside a vision part, which is omitted."""
    for name in MODELS:
        config = json.loads((DATA / name / "config.json").read_text())
        found = architectures.family_of(Config(config))
        if found == family:
            return  # Its logits are compared above.
        if found is None or found.section or found.metadata != family.metadata:
            continue
        if found.architecture != family.architecture:
            continue
        source = checkpoint(name, tmp_path)
        nested = {"architectures": [family.names[0]], "text_config": config}
        (source / "config.json").write_text(json.dumps(nested))
        for shard in source.glob("*.safetensors"):
            header, data = files.read(shard)
            root = "language_model.model."
            moved = {re.sub(r"^model\.", root, key): v for key, v in header.items()}
            files.write(shard, moved, data)
        conversion = prepare(source, Options())
        conversion.close()
        assert conversion.architecture == family.architecture
        return
    pytest.fail("no checkpoint has these layers")
