"""Checkpoints with quantised weights, and refused ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors

from tests.unit.convert import files
from tests.unit.convert.files import edit
from tests.unit.convert.test_parity import checkpoint
from worker.convert.checkpoint import Checkpoint, read_bytes
from worker.convert.prepare import Options, prepare
from worker.convert.quantize import encode, to_float32
from worker.convert.safetensors import read_header
from worker.errors import ModelError

DTYPES = {
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
}
DTYPES |= {"I32": np.int32, "U32": np.uint32, "I64": np.int64}
DTYPES |= dict.fromkeys(("F8_E8M0", "F8_E5M2"), np.uint8)
PARTED = {"weights": {"strategy": "block", "block_structure": [48, 96]}}
"""Blocks of which the last is shorter: 64 rows are not 2 times 32."""
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
WEIGHT = "model.layers.1.mlp.down_proj.weight"
STATE = "weight.quant_state.bitsandbytes__nf4"
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""The values of E2M1."""
PACKAGES = Path(__file__).parents[2] / "data/quantised"
"""Weights as their own packages store them, with the packages' dequantised values."""

Tensors = dict[str, tuple[str, np.ndarray]]


def read_all(path: Path) -> Tensors:
    return {
        name: (dtype, np.frombuffer(values, DTYPES[dtype]).reshape(shape))
        for name, dtype, shape, values in files.read_tensors(path)
    }


def write_all(path: Path, tensors: Tensors) -> None:
    each = ((name, kind, a.shape, a.tobytes()) for name, (kind, a) in tensors.items())
    files.write_tensors(path, each)


def e4m3(byte: int) -> float:
    """Decode by the definition: sign, four bits of exponent, three of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def tensor(file: Path, name: str) -> np.ndarray:
    found = next(t for t in gguf.GGUFReader(file).tensors if t.name == name)
    return np.asarray(gguf.dequantize(found.data, found.tensor_type))


def converted(source: Path, tmp_path: Path, outtype: str = "f32") -> Path:
    target = files.converted(source, tmp_path / "model.gguf", "--outtype", outtype)
    assert files.verified(source, target) == 0
    return target


@pytest.mark.parametrize(
    ("scale_shape", "block", "method"),
    [
        ((2, 3), [32, 32], {"quant_method": "fp8", "weight_block_size": [32, 32]}),
        ((2, 1), [48, 96], {"quant_method": "fp8", "weight_block_size": [48, 96]}),
        ((2, 1), [48, 96], {**COMPRESSED, "config_groups": {"group_0": PARTED}}),
        ((64, 1), [1, 96], COMPRESSED),
        ((), [64, 96], {"quant_method": "compressed-tensors", "format": "naive-quantized"}),
        ((), [64, 96], {"quant_method": "modelopt", "quant_algo": "FP8"}),
    ],
    ids=["blocks", "blocks-cut", "compressed-blocks-cut", "rows", "whole", "modelopt"],
)
def test_fp8_is_multiplied_with_its_scales(
    tmp_path: Path, scale_shape: tuple[int, ...], block: list[int], method: dict[str, Any]
) -> None:
    source = checkpoint("qwen3", tmp_path)
    tensors = read_all(source / "model.safetensors")
    generator = np.random.default_rng(1)
    raw = generator.integers(0, 127, (64, 96), dtype=np.uint8)
    raw |= generator.integers(0, 2, raw.shape, dtype=np.uint8) << 7
    scale = generator.random(scale_shape, dtype=np.float32) * np.float32(1e-3)
    tensors[WEIGHT] = ("F8_E4M3", raw)
    suffix = "_scale_inv" if method["quant_method"] == "fp8" else "_scale"
    tensors[WEIGHT + suffix] = ("F32", np.asarray(scale))
    for unused in ("input_scale", "input_scale_ub"):
        tensors[WEIGHT.replace("weight", unused)] = ("F32", np.ones(1, dtype=np.float32))
    write_all(source / "model.safetensors", tensors)
    edit(source / "config.json", quantization_config=method)
    grid = np.asarray(scale).reshape(-(-64 // block[0]), -(-96 // block[1]))
    factors = np.repeat(np.repeat(grid, block[0], 0), block[1], 1)[:64]
    expected = np.vectorize(e4m3, otypes=[np.float32])(raw) * factors
    got = tensor(converted(source, tmp_path), "blk.1.ffn_down.weight")
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("scale_shape", "block"), [((4,), None), ((4, 1, 1), None), ((4, 4, 2), [16, 32])]
)
def test_a_stack_of_experts_has_scales_for_each(
    tmp_path: Path, scale_shape: tuple[int, ...], block: list[int] | None
) -> None:
    """As in Mistral's published models, beside scales of activations."""
    source = checkpoint("mistral-4", tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors = read_all(source / "model.safetensors")
    shape = tensors[name][1].shape
    generator = np.random.default_rng(1)
    raw = generator.integers(0, 127, shape, dtype=np.uint8)
    scale = generator.random(scale_shape, dtype=np.float32) * np.float32(1e-3)
    tensors |= {name: ("F8_E4M3", raw), f"{name}_scale_inv": ("F32", scale)}
    for unused in (f"{name}_activation_scale", "model.layers.1.self_attn.o_proj.activation_scale"):
        tensors[unused] = ("F32", np.ones(4, dtype=np.float32))
    write_all(source / "model.safetensors", tensors)
    method = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "static"}
    edit(source / "config.json", quantization_config=method)
    grid = scale.reshape(4, *(scale_shape[1:] or (1, 1)))
    factors = grid.repeat(shape[1] // grid.shape[1], 1).repeat(shape[2] // grid.shape[2], 2)
    expected = np.vectorize(e4m3, otypes=[np.float32])(raw) * factors
    target = converted(source, tmp_path)
    gate, up = np.split(expected, 2, axis=1)
    assert np.array_equal(tensor(target, "blk.1.ffn_gate_exps.weight"), gate)
    assert np.array_equal(tensor(target, "blk.1.ffn_up_exps.weight"), up)


def with_scale(source: Path, scale: str, values: np.ndarray) -> np.ndarray:
    """Give an FP8 weight one scale per row, of this type; returns the weight's bytes."""
    tensors = read_all(source / "model.safetensors")
    raw = np.random.default_rng(1).integers(0, 127, (64, 96), dtype=np.uint8)
    tensors |= {WEIGHT: ("F8_E4M3", raw), f"{WEIGHT}_scale_inv": (scale, values)}
    write_all(source / "model.safetensors", tensors)
    edit(source / "config.json", quantization_config={"quant_method": "fp8"})
    return raw


def test_a_scale_that_is_an_exponent_is_a_power_of_two(tmp_path: Path) -> None:
    source = checkpoint("qwen3", tmp_path)
    exponents = np.linspace(110, 120, 64, dtype=np.uint8).reshape(64, 1)
    raw = with_scale(source, "F8_E8M0", exponents)
    expected = np.vectorize(e4m3, otypes=[np.float32])(raw)
    expected = np.ldexp(expected, exponents.astype(int) - 127)
    got = tensor(converted(source, tmp_path), "blk.1.ffn_down.weight")
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("kind", ["U8", "F8_E5M2"])
def test_a_scale_of_unknown_meaning_is_refused(kind: str, tmp_path: Path) -> None:
    source = checkpoint("qwen3", tmp_path)
    with_scale(source, kind, np.full((64, 1), 120, dtype=np.uint8))
    with pytest.raises(ModelError, match=f"_scale_inv scales by values of type {kind}; BF16,"):
        prepare(source, Options())


def test_int8_is_multiplied_with_its_scales(tmp_path: Path) -> None:
    source = checkpoint("qwen3", tmp_path)
    tensors = read_all(source / "model.safetensors")
    raw = np.random.default_rng(2).integers(-127, 128, (64, 96), dtype=np.int8)
    scale = np.linspace(1e-3, 2e-3, 64, dtype=np.float32).reshape(64, 1)
    tensors[WEIGHT] = ("I8", raw)
    tensors[f"{WEIGHT}_scale"] = ("F32", scale)
    write_all(source / "model.safetensors", tensors)
    method = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    edit(source / "config.json", quantization_config=method)
    got = tensor(converted(source, tmp_path), "blk.1.ffn_down.weight")
    assert np.array_equal(got, raw.astype(np.float32) * scale)


def test_mxfp4_experts_keep_their_bits(tmp_path: Path) -> None:
    source = checkpoint("gpt-oss", tmp_path)
    tensors = read_all(source / "model.safetensors")
    generator = np.random.default_rng(3)
    expected = {}
    for i in range(2):
        for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[prefix]
            blocks = generator.integers(0, 256, (4, rows, columns // 32, 16), dtype=np.uint8)
            scales = generator.integers(118, 124, (4, rows, columns // 32), dtype=np.uint8)
            tensors[f"{prefix}_blocks"] = ("U8", blocks)
            tensors[f"{prefix}_scales"] = ("U8", scales)
            pairs = np.stack([blocks & 15, blocks >> 4], -1).reshape(4, rows, columns // 32, 32)
            values = np.asarray(FP4, dtype=np.float32)[pairs]
            values = np.ldexp(values, scales.astype(int)[..., None] - 127)
            expected[i, name] = values.reshape(4, rows, columns)
    write_all(source / "model.safetensors", tensors)
    edit(source / "config.json", quantization_config={"quant_method": "mxfp4"})
    target = converted(source, tmp_path, "q8_0")
    for i in range(2):
        gate_up = expected[i, "gate_up_proj"]
        assert np.array_equal(tensor(target, f"blk.{i}.ffn_gate_exps.weight"), gate_up[:, ::2])
        assert np.array_equal(tensor(target, f"blk.{i}.ffn_up_exps.weight"), gate_up[:, 1::2])
        down = expected[i, "down_proj"]
        assert np.array_equal(tensor(target, f"blk.{i}.ffn_down_exps.weight"), down)
    types = {t.tensor_type.name for t in gguf.GGUFReader(target).tensors if "exps.w" in t.name}
    assert types == {"MXFP4"}


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F4", 4)],
)
def test_every_type_of_safetensors_is_read(dtype: str, bits: int, tmp_path: Path) -> None:
    """Also by its own library; an unused tensor may have any type."""
    path, n_bytes = tmp_path / "model.safetensors", 8 * bits
    entry = {"dtype": dtype, "shape": [8, 8], "data_offsets": [0, n_bytes]}
    files.write(path, {"x": entry}, bytes(n_bytes))
    read = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    assert [name for name, _ in read] == ["x"]
    (info,) = read_header(path)
    assert (info.dtype, info.size_bytes, info.row_bytes) == (dtype, n_bytes, bits)


def stored_by_package(name: str, folder: Path) -> Tensors:
    """Make a folder with one weight; returns its tensors without the expected values."""
    file = PACKAGES / f"{name}.safetensors"
    with safetensors.safe_open(file, "numpy") as opened:
        describe(folder, json.loads(opened.metadata()["config"]))
    tensors = read_all(file)
    write_all(folder / "model.safetensors", tensors)
    return tensors


def describe(folder: Path, method: dict[str, Any]) -> None:
    config = json.dumps({"quantization_config": method})
    (folder / "config.json").write_text(config, encoding="utf-8")


@pytest.mark.parametrize("name", sorted(path.stem for path in PACKAGES.glob("*")))
def test_a_weight_has_the_values_of_its_own_package(name: str, tmp_path: Path) -> None:
    """To the last bit of the type in which the package computes; rows are read a few at a time.
    ModelOpt's zero has no sign."""
    stored_by_package(name, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    expected = checkpoint.tensors.pop("expected")
    (weight,) = checkpoint.tensors.values()
    assert (weight.name, weight.dtype, weight.shape) == ("weight", "F32", expected.shape)
    pieces = [(i, min(5, weight.n_rows - i)) for i in range(0, weight.n_rows, 5)]
    got = np.concatenate([checkpoint.read_rows(weight, *piece) for piece in pieces])
    rounded = encode(got, expected.dtype).view(DTYPES[expected.dtype]).reshape(expected.shape)
    assert np.array_equal(to_float32(rounded), to_float32(checkpoint.read(expected)))


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], object]:
    def damage(tensors: Tensors) -> None:
        kind, values = tensors[name]
        tensors[name] = kind, np.ascontiguousarray(change(values))

    return damage


def stated(**more: Any) -> Callable[[Tensors], object]:
    """Change bitsandbytes' description of a weight."""

    def damage(tensors: Tensors) -> None:
        _, text = tensors[STATE]
        changed = json.dumps({**json.loads(text.tobytes()), **more}).encode()
        tensors[STATE] = "U8", np.frombuffer(changed, np.uint8)

    return damage


def retyped(name: str, kind: str) -> Callable[[Tensors], object]:
    def damage(tensors: Tensors) -> None:
        tensors[name] = kind, tensors[name][1].astype(DTYPES[kind])

    return damage


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("int4", without("weight_shape"), "lacks weight_shape"),
        ("int4", lambda t: t.update(weight=t["expected"]), "has both weight and weight_packed"),
        ("int4", changed("weight_shape", lambda shape: shape * 2), "cannot scale \\[72, 128\\]"),
        ("int4", changed("weight_scale", lambda scale: scale[:, :1].repeat(3, 1)), "cannot scale"),
        ("int3-zero", changed("weight_packed", lambda n: n[:, :1].repeat(7, 1)), "without gaps"),
        ("int4-zero", changed("weight_zero_point", lambda zero: zero[:4]), "cannot scale"),
        ("int4-zero", without("weight_zero_point"), "lacks tensor weight_zero_point"),
        ("int4", changed("weight_shape", lambda shape: shape[:0]), "lacks weight_shape, of 2"),
        ("int4-order", changed("weight_g_idx", lambda order: order * 0), "weight_g_idx"),
        ("int4-order", changed("weight_g_idx", lambda order: order - 1), "weight_g_idx"),
        ("int4-order", changed("weight_g_idx", lambda order: order + 2**30), "weight_g_idx"),
        ("fp8-modelopt", changed("weight", lambda numbers: numbers[:0]), "cannot scale \\[0, "),
        (
            "nvfp4-modelopt",
            retyped("weight_scale", "F32"),
            "scales by values of type F32; F8_E4M3,",
        ),
        ("gptq", without("qzeros"), "lacks tensor qzeros"),
        ("gptq", changed("qzeros", lambda zero: zero + 1), "qzeros has zero points other"),
        (
            "gptq",
            changed("qzeros", lambda zeros: zeros[:1]),
            "qzeros of shape \\[1, 8\\] cannot scale",
        ),
        ("gptq", changed("scales", lambda scales: scales[:, :60]), "scales of shape \\[3, 60\\]"),
        (
            "gptq",
            changed("scales", lambda scales: scales[0]),
            "scales has shape \\[64\\], which is no",
        ),
        ("gptq", changed("g_idx", lambda order: order + 1), "g_idx of shape \\[96\\] cannot scale"),
        (
            "gptq",
            changed("g_idx", lambda order: order[:95]),
            "384 bits, which are not 95 integers of 2",
        ),
        (
            "gptq",
            changed("qweight", lambda words: words[:11]),
            "qweight has rows of 352 bits, which",
        ),
        ("gptq", changed("qweight", lambda words: words[:0]), "cannot scale"),
        ("gptq", retyped("scales", "I32"), "scales by values of type I32; BF16, F16, F32"),
        ("gptq", lambda t: t.update(weight=t["expected"]), "has both weight and qweight"),
        ("awq", without("qzeros"), "lacks tensor qzeros"),
        ("awq", changed("scales", lambda scales: scales[:, :60]), "cannot scale"),
        ("awq", changed("qweight", lambda words: words[:, :7]), "cannot scale"),
        ("bnb-8", changed("SCB", lambda scale: scale[:63]), "SCB of shape \\[63\\] cannot scale"),
        ("bnb-8", changed("weight_format", lambda kind: kind + 1), "the layout of one kind of GPU"),
        ("bnb-nf4", without(STATE), f"lacks tensor {STATE}"),
        ("bnb-nf4", without("weight.quant_map"), "lacks tensor weight.quant_map"),
        (
            "bnb-nf4",
            changed(STATE, lambda text: text[:-1]),
            f"{STATE} is not a description.*truncated",
        ),
        ("bnb-nf4", changed(STATE, lambda text: text.repeat(1000)), "77000 bytes of type U8"),
        ("bnb-nf4", changed(STATE, lambda text: text * 0 + 91), f"{STATE} is not a description"),
        ("bnb-nf4", stated(shape=[64, 96]), "1536 bytes, which are not blocks of 64 values"),
        ("bnb-nf4", stated(shape=[2**47, 2**47]), "not blocks of 64 values of four bits"),
        ("bnb-nf4", stated(shape=[2**80, 0]), f"{STATE} is not a description.*shape"),
        ("bnb-nf4", stated(shape=None), f"{STATE} is not a description.*shape"),
        ("bnb-nf4", stated(blocksize=0), f"{STATE} is not a description.*blocksize"),
        ("bnb-nf4", stated(blocksize=2048), "not blocks of 2048 values of four bits"),
        ("bnb-nf4", changed("weight.absmax", lambda scale: scale[1:]), "absmax has shape \\[47\\]"),
        ("bnb-nf4", changed("weight.quant_map", lambda table: table[1:]), "quant_map has shape"),
        ("bnb-nf4-double", without("weight.nested_quant_map"), "lacks tensor weight.nested_quant"),
        ("bnb-nf4-double", without("weight.nested_absmax"), "lacks tensor weight.nested_absmax"),
        (
            "bnb-nf4-double",
            stated(nested_blocksize=32),
            "nested_absmax has shape .1., not 2 values",
        ),
        ("bnb-nf4-double", stated(nested_offset=1e39), f"{STATE} is not .*nested_offset"),
        ("mlx-4", without("biases"), "lacks tensor biases"),
        ("mlx-4", changed("biases", lambda least: least[:, :1]), "biases of shape .64, 1. cannot"),
        ("mlx-4", changed("scales", lambda scale: scale[:, :2]), "not 64 integers of 4 bits"),
        ("mlx-3", changed("weight", lambda words: words[:, :8]), "rows of 256 bits, which are not"),
        ("mlx-mxfp4", retyped("scales", "F32"), "scales by values of type F32; U8 are known"),
        ("mlx-mxfp4", changed("weight", lambda words: words[:, :6]), "not 96 integers of 4 bits"),
        ("nvfp4", without("weight_global_scale"), "lacks tensor weight_global_scale"),
        ("nvfp4-modelopt", without("weight_scale_2"), "lacks tensor weight_scale_2"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    name: str, damage: Callable[[Tensors], object], words: str, tmp_path: Path
) -> None:
    tensors = stored_by_package(name, tmp_path)
    damage(tensors)
    write_all(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=words):
        Checkpoint.open(tmp_path)


def test_gptq_and_awq_without_their_configuration_are_refused(tmp_path: Path) -> None:
    """Their zero points could be one too low, or their numbers in another order."""
    stored_by_package("gptq", tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="has qweight, and no quantization_config says"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("tile", [1, 7 * 48, 1 << 20])
@pytest.mark.parametrize("name", ["awq", "gptq-order"])
def test_columns_are_read_by_tiles(
    name: str, tile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.convert.checkpoint._TILE_BYTES", tile)
    test_a_weight_has_the_values_of_its_own_package(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gptq-v2", {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "group_size": 2**70}),
        ("fp8-fbgemm", {"quant_method": "fp8", "weight_block_size": [1, 2**70]}),
    ],
)
def test_groups_may_be_wider_than_a_weight(
    name: str, method: dict[str, Any], tmp_path: Path
) -> None:
    stored_by_package(name, tmp_path)
    describe(tmp_path, method)
    checkpoint = Checkpoint.open(tmp_path)
    weight, expected = checkpoint.tensors["weight"], checkpoint.tensors["expected"]
    got = encode(checkpoint.read(weight), expected.dtype).view(DTYPES[expected.dtype])
    assert np.array_equal(got, checkpoint.read(expected).reshape(-1))


def assert_alike(source: Path, plain: Path, tmp_path: Path) -> None:
    """Both convert to the same tensors."""
    one, other = (
        {each.name: each.data for each in gguf.GGUFReader(converted(folder, where)).tensors}
        for folder, where in ((source, tmp_path / "a"), (plain, tmp_path / "b"))
    )
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in other)


def gptq(weight: np.ndarray, scale: np.ndarray) -> dict[str, tuple[str, np.ndarray]]:
    """Store 4-bit integers from -8 to 7 like AutoGPTQ: the zero point is 8, stored as 7."""
    numbers = (weight + 8).astype(np.uint32).T
    words = (numbers.reshape(-1, 8, len(weight)) << 4 * np.arange(8, dtype=np.uint32)[:, None]).sum(
        1
    )
    zeros = np.full((scale.shape[1], len(weight) // 8), 0x77777777, np.int32)
    return {
        "qweight": ("I32", words.astype(np.uint32).view(np.int32)),
        "qzeros": ("I32", zeros),
        "scales": ("F16", np.ascontiguousarray(scale.T)),
        "g_idx": ("I32", np.arange(weight.shape[1], dtype=np.int32) // 32),
        "bias": ("F16", np.zeros(len(weight), np.float16)),
    }


def test_each_byte_of_a_transposed_matrix_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_by_package("gptq-zero", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    weight = checkpoint.tensors["weight"]
    parts = {t.name: t.size_bytes for t in read_header(tmp_path / "model.safetensors")}
    sizes: list[int] = []

    def counted(file: int, size: int, position: int) -> np.ndarray:
        sizes.append(size)
        return read_bytes(file, size, position)

    monkeypatch.setattr("worker.convert.checkpoint.read_bytes", counted)
    monkeypatch.setattr("worker.convert.checkpoint._TILE_BYTES", 7 * 48)
    for first in range(weight.n_rows):
        checkpoint.read_rows(weight, first, 1)
    assert sum(sizes) == sum(parts[name] for name in ("qweight", "qzeros", "scales"))


def write_gptq(folder: Path, tensors: Tensors) -> Tensors:
    """Write random 4-bit weights of GPTQ, with biases; returns the tensors with their values."""
    values, parts, generator = dict(tensors), dict(tensors), np.random.default_rng(4)
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = parts.pop(name)[1].shape
        weight = generator.integers(-8, 8, (rows, columns))
        scale = generator.random((rows, columns // 32)).astype(np.float16)
        stem = name.removesuffix("weight")
        made = {stem + end: part for end, part in gptq(weight, scale).items()}
        parts |= {each: part for each, part in made.items() if each not in parts}
        values[name] = ("F32", weight.astype(np.float32) * scale.astype(np.float32).repeat(32, 1))
    write_all(folder / "model.safetensors", parts)
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    edit(folder / "config.json", quantization_config=method)
    return values


@pytest.mark.parametrize("change", [0, 1])
def test_zero_biases_are_kept_if_the_model_has_them(change: int, tmp_path: Path) -> None:
    """GPTQ's packages add one to every layer; Qwen 2 has them for q, k and v, and they are kept for
    all layers of a kind, zero or not."""
    source = checkpoint("qwen2", tmp_path)
    tensors = read_all(source / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "_proj.bias" not in name}
    up = "model.layers.1.mlp.up_proj"
    n_rows = len(tensors[f"{up}.weight"][1])
    write_gptq(source, {**tensors, f"{up}.bias": ("F16", np.full(n_rows, change, np.float16))})
    made = {tensor.name for tensor in prepare(source, Options()).tensors}
    kept = ["attn_q", "attn_k", "attn_v", *["ffn_up"] * change]
    layers = len({name.split(".")[1] for name in made if name.startswith("blk.")})
    biases = {f"blk.{i}.{each}.bias" for each in kept for i in range(layers)}
    assert {name for name in made if name.endswith(".bias")} == biases


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi-3", "qwen3-moe"])
def test_a_gptq_checkpoint_equals_the_conversion_of_its_values(family: str, tmp_path: Path) -> None:
    """With rows that llama.cpp reorders, parts of fused matrices, and experts; with the zero biases
    that AutoGPTQ adds and the model's own class ignores."""
    source, plain = (checkpoint(family, tmp_path / each) for each in ("gptq", "plain"))
    values = write_gptq(source, read_all(source / "model.safetensors"))
    write_all(plain / "model.safetensors", values)
    assert_alike(source, plain, tmp_path)


def affine(values: np.ndarray, n_bits: int) -> tuple[Tensors, np.ndarray]:
    """Return values as MLX stores them in four or eight bits, in groups of 16, and their
    meaning."""
    groups = values.reshape(*values.shape[:-1], -1, 16)
    least, most = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (most - least) / np.float32((1 << n_bits) - 1)
    numbers = np.rint((groups - least) / scale).astype(np.uint8).reshape(values.shape)
    data = numbers if n_bits == 8 else numbers[..., ::2] | numbers[..., 1::2] << 4
    stood = numbers.reshape(groups.shape).astype(np.float32) * scale + least
    parts = {"weight": ("U32", data.view(np.uint32)), "scales": ("F32", scale[..., 0])}
    return {**parts, "biases": ("F32", least[..., 0])}, stood.reshape(values.shape)


def nvfp4(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Return values of this shape as MLX stores them in its mode, and their meaning."""
    generator = np.random.default_rng(values.size)
    numbers = generator.integers(0, 16, values.shape, np.uint8)
    scale = generator.integers(1, 64, (*values.shape[:-1], values.shape[-1] // 16), np.uint8)
    scales = np.vectorize(e4m3, otypes=[np.float32])(scale).repeat(16, -1)
    data = numbers[..., ::2] | numbers[..., 1::2] << 4
    parts = {"weight": ("U32", data.view(np.uint32)), "scales": ("U8", scale)}
    return parts, np.array(FP4, np.float32)[numbers] * scales


@pytest.mark.parametrize(
    ("family", "mode"),
    [*((each, "") for each in ("llama", "qwen3-moe", "qwen3.5", "deepseek-v3"))]
    + [("qwen3-moe", "nvfp4")],
)
def test_an_mlx_checkpoint_equals_the_conversion_of_its_values(
    family: str, mode: str, tmp_path: Path
) -> None:
    """With the embedding, stacks of experts, and layers of other sizes and of the affine mode;
    filters are transposed, and the norms beside them already include the offset of llama.cpp's
    file.
    """
    source, plain = (checkpoint(family, tmp_path / each) for each in ("mlx", "plain"))
    tensors = read_all(source / "model.safetensors")
    sizes: dict[str, Any] = {"bits": 4, "group_size": 16, **({"mode": mode} if mode else {})}
    values = {name: ("F32", to_float32(data)) for name, (_, data) in tensors.items()}
    stored, modules = dict(values), {}
    stacks: dict[str, list[tuple[str, np.ndarray]]] = {}
    for name in [name for name in values if name.endswith("kv_b_proj.weight")]:
        heads = values[name][1].reshape(4, 16 + 24, -1)
        halves = {"embed_q": heads[:, :16].swapaxes(1, 2), "unembed_out": heads[:, 16:]}
        del stored[name]
        for end, half in halves.items():
            stored[name.replace("kv_b_proj", end)] = ("F32", np.ascontiguousarray(half))
    wanted = re.compile(r".*(_proj|embed_tokens|head)\.weight")
    fit = [name for name, (_, data) in stored.items() if data.shape[-1] % 16 == 0]
    for name in filter(wanted.fullmatch, fit):
        n_bits = 8 if "q_proj" in name else 4
        unpacked = stored.pop(name)[1]
        parts, whole = nvfp4(unpacked) if mode and n_bits == 4 else affine(unpacked, n_bits)
        values[name] = ("F32", whole)
        stem = name.removesuffix("weight")
        into, member = re.subn(r"experts\.\d+", "switch_mlp", stem)
        for end, part in parts.items():
            if member:
                stacks.setdefault(into + end, []).append(part)
            else:
                stored[stem + end] = part
        if n_bits == 8:
            modules[stem[:-1]] = {"bits": 8, "group_size": 16}
    for name, members in stacks.items():
        stored[name] = (members[0][0], np.stack([data for _, data in members]))
    if family == "qwen3.5":
        for name, (kind, data) in stored.items():
            if name.endswith("conv1d.weight"):
                stored[name] = (kind, data.swapaxes(1, 2).copy())
            elif name.endswith("norm.weight") and "linear_attn" not in name:
                stored[name] = (kind, data + np.float32(1))
    write_all(source / "model.safetensors", stored)
    write_all(plain / "model.safetensors", values)
    edit(source / "config.json", quantization={**sizes, **modules})
    assert_alike(source, plain, tmp_path)


def test_four_bit_experts_are_converted(tmp_path: Path) -> None:
    """As in the published Kimi K2 Thinking: each expert's matrices, in groups of 32."""
    source = checkpoint("qwen3-moe", tmp_path)
    tensors, generator = read_all(source / "model.safetensors"), np.random.default_rng(4)
    expected: dict[str, np.ndarray] = {}
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors.pop(name)[1].shape
        codes = generator.integers(0, 16, (rows, columns), dtype=np.uint32)
        scale = generator.random((rows, columns // 32), dtype=np.float32) * np.float32(1e-2)
        # Eight numbers per I32, the first in its lowest bits.
        words = (codes.reshape(rows, -1, 8) << 4 * np.arange(8, dtype=np.uint32)).sum(-1)
        tensors[f"{name}_packed"] = ("I32", words.astype(np.uint32).view(np.int32))
        tensors[f"{name}_scale"] = ("F32", scale)
        tensors[f"{name}_shape"] = ("I32", np.array([rows, columns], np.int32))
        expected[name] = (codes.astype(np.float32) - 8) * scale.repeat(32, 1)
    write_all(source / "model.safetensors", tensors)
    edit(source / "config.json", quantization_config=packed(4))
    target = converted(source, tmp_path)
    for layer in range(2):
        for ggufs, published in {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}.items():
            experts = f"model.layers.{layer}.mlp.experts"
            stack = [expected[f"{experts}.{i}.{published}.weight"] for i in range(4)]
            got = tensor(target, f"blk.{layer}.ffn_{ggufs}_exps.weight")
            assert np.array_equal(got, np.stack(stack))


def packed(n_bits: int) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": n_bits, "group_size": 32}}
    groups = {"group_0": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    }


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (
            "nvfp4-modelopt",
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
            },
        ),
        (
            "nvfp4",
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {
                    "group_0": {"format": "float-quantized"},
                    "group_1": {"format": "nvfp4-pack-quantized"},
                },
            },
        ),
    ],
)
def test_layers_may_have_formats_of_their_own(
    name: str, method: dict[str, Any], tmp_path: Path
) -> None:
    stored_by_package(name, tmp_path)
    describe(tmp_path, method)
    assert Checkpoint.open(tmp_path).tensors.keys() == {"weight", "expected"}
    (*_, part), key = method.values(), "quant_algo" if "quant_algo" in method else "format"
    part[list(part)[-1]][key] = "other"
    describe(tmp_path, method)
    with pytest.raises(ModelError, match=r"quantised by .* \(.*other\) cannot be converted"):
        Checkpoint.open(tmp_path)
