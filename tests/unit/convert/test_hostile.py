"""Checkpoints that are made to be expensive to convert: each ends with a message, soon and in
bounded memory."""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.convert import files
from tests.unit.convert.files import edit, rename
from tests.unit.convert.test_parity import MODELS, checkpoint
from worker.convert.adapter import convert_adapter
from worker.convert.prepare import Options, prepare
from worker.errors import ModelError
from worker.models.gguf.header import read_header
from worker.models.resolve import bundled_folder

ADAPTER = Path(__file__).parents[2] / "data/adapter"
_MOST_MIB = 300


@contextmanager
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(f"{grown} MiB more at most")
    assert grown < _MOST_MIB


def token_id(folder: Path, i: int) -> None:
    with files.rewritten(folder / "tokenizer.json") as tokenizer:
        tokenizer["model"]["vocab"]["far away"] = i


def long_number(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 288', f'"vocab_size": {"9" * 5000}'))


def shape(folder: Path, extent: int) -> None:
    header, data = files.read(folder / "model.safetensors")
    header["model.norm.weight"]["shape"] = [extent, 0]
    files.write(folder / "model.safetensors", header, data)


def rope(folder: Path, **more: Any) -> None:
    with files.rewritten(folder / "config.json") as config:
        config["rope_parameters"] |= more


def spare_scale(folder: Path) -> None:
    """Add a scale to a weight that needs none, which must mean another value."""
    name = "model.layers.0.mlp.up_proj.weight"
    rename(folder / "model.safetensors", "model.norm.weight", f"{name}_scale")


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "token id": (lambda f: token_id(f, 5_000_000), "has the id 5000000"),
    "token id below zero": (lambda f: token_id(f, -5), "has the id -5"),
    "vocabulary": (lambda f: edit(f / "config.json", vocab_size=2**31 - 1), "vocab_size"),
    "layers": (lambda f: edit(f / "config.json", num_hidden_layers=2**31 - 1), "tensors"),
    "heads": (lambda f: edit(f / "config.json", num_attention_heads=2**31 - 1), "heads is 2"),
    "5,000 digits": (long_number, "not readable JSON"),
    "infinity": (lambda f: edit(f / "config.json", rms_norm_eps=float("inf")), "must be a number"),
    "shape": (lambda f: shape(f, 10**400), r"no valid entry.*\$\.shape"),
    "below zero": (lambda f: edit(f / "config.json", rms_norm_eps=-1e-6), "must be a number"),
    "no rotation": (lambda f: rope(f, rope_theta=0), "above 0"),
    "no factor": (lambda f: rope(f, rope_type="linear", factor=0), "above 0"),
    "half a head": (lambda f: rope(f, partial_rotary_factor=0.5), "whole heads"),
    "windows": (lambda f: rope(f, sliding_attention={"rope_type": "yarn"}), "within windows"),
    "gemma-3: kind": (lambda f: edit(f / "config.json", layer_types=["odd"]), "layer_types may"),
    "scale": (spare_scale, "model.layers.0.mlp.up_proj.weight_scale"),
    "4,000 digits": (lambda f: edit(f / "config.json", rms_norm_eps=10**4000), "must be a number"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    source = checkpoint(name.rpartition(": ")[0] or "llama", tmp_path)
    CASES[name][0](source)
    with little_memory(), pytest.raises(ModelError, match=CASES[name][1]) as caught:
        prepare(source, Options())
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "family", ["deepseek-v3", "qwen3-moe", "gemma-4", "nemotron-h", "qwen3-next"]
)
def test_no_huge_count_of_any_family_takes_memory(family: str, tmp_path: Path) -> None:
    source = checkpoint(family, tmp_path)
    config = json.loads((source / "config.json").read_text())
    with little_memory():
        for key in (key for key, value in config.items() if type(value) is int):
            edit(source / "config.json", **config | {key: 2**31 - 1})
            with suppress(ModelError):
                prepare(source, Options()).close()


# --- generated ---------------------------------------------------------------------------

ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf")]
ODD += ["", "x" * 5000, "\u0000", "../../x", [], [None], [[]], {}, {"a": {}}, 0.5, "64", [64]]


def mutated(value: Any, draw: random.Random) -> Any:
    """Return the value with one part changed, removed, duplicated or of another type."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        what = draw.random()
        if what < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.2:
            return {**value, str(draw.choice(ODD)): value[key]}
        return {**value, key: mutated(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        i = draw.randrange(len(value))
        return [*value[:i], mutated(value[i], draw), *value[i + 1 :]]
    if type(value) is int and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 1000, 2**20])
    return draw.choice(ODD)


def damage(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(min(len(data), 4096))] = draw.randrange(256)
    path.write_bytes(data)


def change(folder: Path, name: str, draw: random.Random) -> None:
    path = folder / name
    if draw.random() < 0.2:
        damage(path, draw)
    elif name.endswith(".safetensors"):
        header, data = files.read(path)
        files.write(path, mutated(header, draw), data)
    else:
        sys.set_int_max_str_digits(0)
        path.write_text(json.dumps(mutated(json.loads(path.read_text("utf-8")), draw)), "utf-8")
        sys.set_int_max_str_digits(4300)


FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("rounds", [60, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_a_mutated_checkpoint_is_converted_or_refused(
    name: str, rounds: int, tmp_path: Path
) -> None:
    draw, refused = random.Random(f"{name} {rounds}"), 0
    with little_memory():
        for n in range(rounds):
            source = checkpoint(draw.choice(MODELS), tmp_path)
            if not (source / name).is_file():
                shutil.rmtree(source)
                continue
            change(source, name, draw)
            try:
                prepare(source, Options()).close()
            except ModelError as error:
                refused += 1
                message = error.message
                assert "\n" not in message and len(message) < 1100, message[:200]
            except BaseException:
                shutil.copytree(source, tmp_path / f"failed-{n}")
                raise
            shutil.rmtree(source)
    print(f"{name}: {rounds} changed, {refused} refused in a sentence")
    assert refused > rounds / 10


@pytest.mark.parametrize("rounds", [60, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_a_mutated_adapter_is_converted_or_refused(rounds: int, tmp_path: Path) -> None:
    base = files.converted(bundled_folder(), tmp_path / "base.gguf", "--outtype", "f16")
    header, draw, refused = read_header(base), random.Random(rounds), 0
    with little_memory():
        for _ in range(rounds):
            folder = Path(shutil.copytree(ADAPTER, tmp_path / "adapter"))
            change(folder, draw.choice(["adapter_config.json", "adapter_model.safetensors"]), draw)
            try:
                convert_adapter(folder, header, tmp_path / "adapter.gguf")
            except ModelError as error:
                refused += 1
                assert len(error.message) < 1100, error.message[:200]
            shutil.rmtree(folder)
    print(f"{rounds} changed, {refused} refused in a sentence")
    assert refused > rounds / 10
    assert not list(tmp_path.glob(".*"))
