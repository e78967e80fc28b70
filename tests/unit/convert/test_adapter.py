"""LoRA adapters: PEFT's matrices into a GGUF adapter, and its logits against PEFT's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file

from tests.support.bundled import bundled_gguf
from tests.unit.convert import engine
from tests.unit.convert.files import converted, edit, read_tensors
from tests.unit.convert.test_parity import checkpoint
from worker.commands import convert as cli
from worker.convert.adapter import convert_adapter
from worker.convert.quantize import to_float32
from worker.errors import ModelError
from worker.models.adapter import check_adapter
from worker.models.gguf.header import read_header
from worker.wire.adapters import Adapter, parse_adapter

ADAPTER = Path(__file__).parents[2] / "data/adapter"
EXPECTED: dict[str, list[Any]] = json.loads((ADAPTER / "expected.json").read_text())


@pytest.fixture
def base() -> Path:
    return bundled_gguf("f32")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy an adapter for the test."""
    return Path(shutil.copytree(ADAPTER, tmp_path / "adapter"))


def adapted_logits(gguf: Path, adapter: Path, scale: float) -> Any:
    return engine.logits(gguf, EXPECTED["tokens"], adapter=(adapter, scale))[-1]


def test_logits_equal_pefts(base: Path, tmp_path: Path) -> None:
    """With matrices of two ranks and two alphas, and rotary heads that llama.cpp interleaves."""
    target = tmp_path / "adapter.gguf"
    assert cli.run(["adapter", str(ADAPTER), str(base), str(target)]) == 0
    expected = np.array(EXPECTED["adapted"])
    largest = np.abs(expected).max()
    found = adapted_logits(base, target, 1.0)
    assert np.abs(found - expected).max() <= 1e-4 * largest
    without = adapted_logits(base, target, 0.0)
    assert np.abs(without - np.array(EXPECTED["base"])).max() <= 1e-4 * largest
    check_adapter(read_header(target), read_header(base))


def test_rank_stabilised_scales_are_folded_in(base: Path, copy: Path, tmp_path: Path) -> None:
    edit(copy / "adapter_config.json", use_rslora=True, alpha_pattern={})
    weights = load_file(copy / "adapter_model.safetensors")
    halved = {
        name: (values / np.sqrt(4 if "down_proj" in name else 2)).astype(np.float32)
        if "lora_B" in name
        else values.astype(np.float32)
        for name, values in weights.items()
    }
    plain = shutil.copytree(copy, tmp_path / "plain")
    edit(plain / "adapter_config.json", use_rslora=False)
    save_file(halved, copy / "adapter_model.safetensors")
    found = []
    for folder in (copy, plain):
        target = tmp_path / f"{folder.name}.gguf"
        convert_adapter(folder, read_header(base), target)
        found.append(adapted_logits(base, target, 1.0))
    assert np.abs(found[0] - found[1]).max() < 1e-3


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("peft_type", "IA3", "only LORA"),
        ("use_dora", True, "DoRA"),
        ("modules_to_save", ["lm_head"], "whole modules"),
        ("bias", "all", "trains biases"),
        ("lora_alpha", 0, "lora_alpha above 0"),
        ("init_lora_weights", "pissa_niter_4", "a base that its training changed"),
        ("init_lora_weights", "OLoRA", "a base that its training changed"),
        ("init_lora_weights", "lora_ga", "a base that its training changed"),
        ("kasa_config", {"beta": 1e-4}, "singular values of its own"),
        ("alpha_pattern", {"up_proj(": 16}, "is malformed"),
        ("alpha_pattern", {".*_proj": "x"}, "alpha_pattern: .*_proj must be a number"),
        ("alpha_pattern", 5, "alpha_pattern must be an object, not 5"),
    ],
)
def test_other_kinds_are_refused_by_name(
    base: Path, copy: Path, key: str, value: object, words: str
) -> None:
    edit(copy / "adapter_config.json", **{key: value})
    with pytest.raises(ModelError, match=words):
        convert_adapter(copy, read_header(base), copy / "a.gguf")
    assert not list(copy.glob("a.gguf*"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base_model.model.model.layers.0.self_attn.x_proj.lora_A.weight", "needs two matrices"),
        ("base_model.model.lm_head.lora_embedding_A", "not a matrix of a LoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", "not a matrix of a LoRA"),
    ],
)
def test_odd_tensors_are_refused_by_name(base: Path, copy: Path, name: str, words: str) -> None:
    path = copy / "adapter_model.safetensors"
    save_file({**load_file(path), name: np.zeros((2, 256), np.float32)}, path)
    with pytest.raises(ModelError, match=words):
        convert_adapter(copy, read_header(base), copy / "a.gguf")


def test_an_adapter_of_heads_with_another_width_is_permuted_like_its_weight(tmp_path: Path) -> None:
    """The delta of a weight with wide heads must be in the order of that weight's rows."""
    source = checkpoint("mistral", tmp_path)
    before = GGUFReader(converted(source, tmp_path / "base.gguf", "--outtype", "f32")).tensors
    name = "model.layers.0.self_attn.q_proj"
    weights = {
        each: to_float32(np.frombuffer(bits, np.uint16)).reshape(shape)
        for each, _, shape, bits in read_tensors(source / "model.safetensors")
    }
    draw = np.random.default_rng(0)
    a, b = (draw.random((n, m), np.float32) for n, m in ((2, 64), (128, 2)))
    folder = tmp_path / "adapter"
    folder.mkdir()
    pair = {f"base_model.model.{name}.lora_{x}.weight": m for x, m in (("A", a), ("B", b))}
    save_file(pair, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    base = read_header(tmp_path / "base.gguf")
    assert convert_adapter(folder, base, tmp_path / "new/adapter.gguf") == 1
    weights[f"{name}.weight"] = weights[f"{name}.weight"] + b @ a
    save_file(weights, source / "model.safetensors")
    after = GGUFReader(converted(source, tmp_path / "merged.gguf", "--outtype", "f32")).tensors
    made = {t.name: t.data for t in GGUFReader(tmp_path / "new/adapter.gguf").tensors}
    wide = "blk.0.attn_q.weight"
    old, new = ({t.name: t.data for t in tensors}[wide] for tensors in (before, after))
    assert np.allclose(made[f"{wide}.lora_b"] @ made[f"{wide}.lora_a"], new - old, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_matrix_that_is_not_finite_is_refused(base: Path, copy: Path, value: float) -> None:
    path = copy / "adapter_model.safetensors"
    matrices = load_file(path)
    name = next(name for name in matrices if "lora_B" in name)
    matrices[name][0, 0] = value
    save_file(matrices, path)
    with pytest.raises(ModelError, match=r"blk\..*lora_b .* has a NaN or an infinity"):
        convert_adapter(copy, read_header(base), copy / "a.gguf")
    assert not list(copy.glob("a.gguf*"))


def test_two_modules_of_one_weight_are_refused(base: Path, copy: Path) -> None:
    path = copy / "adapter_model.safetensors"
    matrices = load_file(path)
    again = {
        name.replace(".model.model.layers", ".model.layers"): v for name, v in matrices.items()
    }
    save_file(matrices | again, path)
    with pytest.raises(ModelError, match=r"Two modules of the adapter .* adapt blk\."):
        convert_adapter(copy, read_header(base), copy / "a.gguf")
    assert not list(copy.glob("a.gguf*"))


def test_another_models_adapter_is_refused(base: Path, copy: Path, tmp_path: Path) -> None:
    path = copy / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({name: values[:, :128] for name, values in weights.items()}, path)
    with pytest.raises(ModelError, match="adapts a weight of"):
        convert_adapter(copy, read_header(base), copy / "a.gguf")
    with pytest.raises(ModelError, match="not a LoRA adapter"):
        check_adapter(read_header(base), read_header(base))


@pytest.mark.parametrize(
    ("family", "module", "weights"),
    [
        ("phi-3", "self_attn.qkv_proj", ["attn_qkv"]),
        ("qwen3", "self_attn.q_proj", ["attn_q"]),
        ("gemma-3", "mlp.down_proj", ["ffn_down"]),
        ("granite-4", "shared_mlp.input_linear", ["ffn_gate", "ffn_up"]),
        ("granite-hybrid-dense", "shared_mlp.input_linear", ["ffn_gate", "ffn_up"]),
        ("granite-hybrid", "shared_mlp.input_linear", ["ffn_gate_shexp", "ffn_up_shexp"]),
    ],
)
def test_names_of_an_adapter_follow_the_familys_table(
    tmp_path: Path, family: str, module: str, weights: list[str]
) -> None:
    source = checkpoint(family, tmp_path)
    header = read_header(converted(source, tmp_path / "model.gguf", "--outtype", "f32"))
    shapes = {t.name: t.shape for t in header.tensors}
    n_in, n_rows = shapes[f"blk.0.{weights[0]}.weight"]
    n_out = n_rows * len(weights)
    name = f"base_model.model.model.layers.0.{module}"
    (tmp_path / "adapter").mkdir()
    save_file(
        {
            f"{name}.lora_A.weight": np.ones((2, n_in), np.float32),
            f"{name}.lora_B.weight": np.ones((n_out, 2), np.float32),
        },
        tmp_path / "adapter/adapter_model.safetensors",
    )
    settings = tmp_path / "adapter/adapter_config.json"
    settings.write_text('{"peft_type": "LORA", "lora_alpha": 2}')
    assert convert_adapter(settings.parent, header, tmp_path / "a.gguf") == len(weights)
    adapter = read_header(tmp_path / "a.gguf")
    check_adapter(adapter, header)
    assert {t.name for t in adapter.tensors} == {
        f"blk.0.{weight}.weight.lora_{part}" for weight in weights for part in "ab"
    }


def test_an_adapter_that_is_not_a_folder_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{base} is not a folder"):
        convert_adapter(base, read_header(base), tmp_path / "a.gguf")


def test_the_flag_of_adapters_is_parsed() -> None:
    assert parse_adapter("a.gguf") == Adapter("a", "a.gguf", 1.0, is_default=True)
    assert parse_adapter("x/a.gguf=0.5") == Adapter("a", "x/a.gguf", 0.5, is_default=True)
    assert parse_adapter("x/a/:0") == Adapter("a", "x/a/", 0.0, is_default=True)
    assert parse_adapter("./x=y/a.gguf") == Adapter("a", "./x=y/a.gguf", is_default=True)
    assert parse_adapter("sql=x/a.gguf") == Adapter("sql", "x/a.gguf")
    assert parse_adapter("sql=x=y:z.gguf:-2") == Adapter("sql", "x=y:z.gguf", -2.0)
    for wrong in ("=1", "", "a=", "=a", "a.gguf=nan", "n=a.gguf:1e9"):
        with pytest.raises(ValueError, match="NAME=.FILE"):
            parse_adapter(wrong)
