"""Makes `tests/data/quantised`: small weights as quantisers store them, and the values to which the
same package dequantises them.

`python -m tools.reference.make_quantised_data` in an environment with PyTorch, transformers,
compressed-tensors 0.20 and nvidia-modelopt; the tests need none of them. With `int4-order` it makes
only that case, by compressed-tensors 0.11: later releases do not support an order of columns. With
`gptq`, `awq`, `bnb` or `mlx` it makes only the cases of GPTQModel 7.7, AutoAWQ 0.2.9, bitsandbytes
0.50 or MLX 0.32; the last needs no PyTorch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if sys.argv[1:] != ["mlx"]:
    import torch  # type: ignore[import-not-found]
    from safetensors.torch import save_file

FOLDER = Path(__file__).parents[2] / "tests/data/quantised"
SHAPE = (36, 64)
"""The number of rows is not a multiple of the eight numbers in an I32."""
PACKED = "pack-quantized"
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": (PACKED, {"num_bits": 4, "group_size": 32}),
    "int4-zero": (PACKED, {"num_bits": 4, "group_size": 16, "symmetric": False}),
    "int4-rows-zero": (PACKED, {"num_bits": 4, "group_size": -1, "symmetric": False}),
    "int2": (PACKED, {"num_bits": 2, "group_size": 32}),
    "int3-zero": (PACKED, {"num_bits": 3, "group_size": 32, "symmetric": False}),
    "int5": (PACKED, {"num_bits": 5, "group_size": 32}),
    "int6-uneven": (PACKED, {"num_bits": 6, "group_size": -1}),
    "int7-rows": (PACKED, {"num_bits": 7, "group_size": -1}),
    "int8-rows": (PACKED, {"num_bits": 8, "group_size": -1}),
    "int8-zero": ("int-quantized", {"num_bits": 8, "group_size": -1, "symmetric": False}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}
ORDERED: dict[str, Any] = {"num_bits": 4, "group_size": 32, "actorder": "group"}
EXACT = ("int4-zero", "int4-order")
"""Cases with scales in float32; the package computes in the scales' type."""

WIDE = (64, 96)
"""A size that fills whole I32s in both directions, with eight numbers in one or 32 in three."""
GPTQ: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": 32, "sym": True},
    "gptq-zero": {"bits": 4, "group_size": 16, "sym": False},
    "gptq-order": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "gptq-v2": {"bits": 4, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq-cut": {"bits": 4, "group_size": 64, "sym": False},
    "gptq-2": {"bits": 2, "group_size": 32, "sym": False},
    "gptq-3": {"bits": 3, "group_size": 32, "sym": False},
    "gptq-8": {"bits": 8, "group_size": 32, "sym": False},
}
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "bnb-nf4": {"quant_type": "nf4", "compress_statistics": False},
    "bnb-nf4-double": {"quant_type": "nf4", "compress_statistics": True},
    "bnb-fp4": {"quant_type": "fp4", "compress_statistics": True},
    "bnb-nf4-half": {"quant_type": "nf4", "compress_statistics": True},
    "bnb-nf4-float": {"quant_type": "nf4", "compress_statistics": False},
}
STORED = {"bnb-nf4-half": "bfloat16", "bnb-nf4-float": "float32"}
"""Types of the cases whose values or bytes are not float16."""

Tensors = dict[str, Any]


def weight() -> Any:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(4)) * 0.05 + 0.01


def extremes(values: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    size = settings["group_size"] if settings["group_size"] > 0 else values.shape[1]
    groups = values.unflatten(-1, (-1, size))
    return groups.amin(-1), groups.amax(-1)


def compressed(name: str) -> tuple[dict[str, Any], Tensors]:
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationArgs,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
        calculate_qparams,
        generate_gparam,
    )

    kind, settings = FORMATS[name]
    values = weight()[:, :-6] if name == "int6-uneven" else weight()  # Its rows end within an I32.
    state, arguments = {"weight": values}, QuantizationArgs(**settings)
    least, most = extremes(state["weight"], settings)
    if name == "nvfp4":
        state["weight_global_scale"] = generate_gparam(least.amin().view(1), most.amax().view(1))
    scale, state["weight_zero_point"] = calculate_qparams(
        least, most, arguments, global_scale=state.get("weight_global_scale")
    )
    is_short = kind in (PACKED, "int-quantized") and name not in EXACT
    state["weight_scale"] = scale.to(torch.bfloat16) if is_short else scale
    compressor = BaseCompressor.get_value_from_registry(kind)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=kind)
    stored = compressor.compress(state, scheme)
    group = {"targets": ["Linear"], "weights": json.loads(arguments.model_dump_json())}
    config = {"quant_method": "compressed-tensors", "format": kind}
    return {**config, "config_groups": {"group_0": group}}, {
        **stored,
        "expected": compressor.decompress(stored, scheme)["weight"],
    }


def ordered() -> tuple[dict[str, Any], Tensors]:
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (  # type: ignore[import-not-found]
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    values, arguments = weight(), QuantizationArgs(**ORDERED)
    order = torch.randperm(SHAPE[1], generator=torch.Generator().manual_seed(5)) // 32
    scale, zero = calculate_qparams(*extremes(values[:, order.argsort()], ORDERED), arguments)
    compressor = PackedQuantizationCompressor()
    index = {"weight_g_idx": order.to(torch.int32)}
    stored = compressor.compress_weight(values, scale, arguments, zero, index["weight_g_idx"])
    stored |= {"weight_scale": scale, **index}
    group = {"targets": ["Linear"], "weights": ORDERED}
    config = {"quant_method": "compressed-tensors", "format": PACKED}
    expected = compressor.decompress_weight(stored, arguments)
    return {**config, "config_groups": {"group_0": group}}, {**stored, "expected": expected}


def modelopt(algorithm: str) -> tuple[dict[str, Any], Tensors]:
    from modelopt.torch.quantization import qtensor  # type: ignore[import-not-found]
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import (  # type: ignore[import-not-found]
        MXFP8QTensor,
    )

    how: dict[str, Any] = {}
    if algorithm == "NVFP4":
        packed, scale, second = qtensor.NVFP4QTensor.quantize(weight(), 16)
        how, stored = {"double_scale": second, "block_sizes": {-1: 16}}, {"weight_scale_2": second}
    elif algorithm == "mxfp4":
        packed, scale = qtensor.MXFP4QTensor.quantize(weight(), 32)
        how, stored = {"block_sizes": {-1: 32}}, {}
        scale = scale.view(SHAPE[0], -1)
    elif algorithm == "MXFP8":
        (packed, scale), stored = MXFP8QTensor.quantize(weight()), {}
    else:
        (packed, scale), stored = qtensor.FP8QTensor.quantize(weight(), axis=0), {}
    expected = packed.dequantize(torch.float32, scale=scale, **how)
    stored |= {"weight": packed._quantized_data, "weight_scale": scale, "expected": expected}
    return {"quant_method": "modelopt", "quant_algo": algorithm}, stored


def fbgemm() -> tuple[dict[str, Any], Tensors]:
    """Return transformers' layer applied to a unit matrix, by the path for Intel GPUs, which works
    without a GPU."""
    from transformers.integrations import fbgemm_fp8  # type: ignore[import-not-found]

    scale = weight().abs().amax(1, keepdim=True) / 448
    stored = {"weight": (weight() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    layer = fbgemm_fp8.FbgemmFp8Linear(SHAPE[1], SHAPE[0], False)
    for name, value in stored.items():
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
    fbgemm_fp8._is_torch_xpu_available = True
    fbgemm_fp8.quantize_fp8_per_row = lambda x, scale_ub: (
        x.to(torch.float8_e4m3fn),
        torch.ones(len(x)),
    )
    expected = layer(torch.eye(SHAPE[1])).T
    return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, {
        **stored,
        "expected": expected,
    }


def limits(values: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return a scale and a zero point for each group, in a row for each row of the weight; some
    rows have no negative numbers, so that their zero point is 0."""
    n_bits, size = settings["bits"], settings["group_size"]
    parts = [part.aminmax(dim=1) for part in values.split(size if size > 0 else WIDE[1], 1)]
    least, most = (torch.stack(each, 1) for each in zip(*parts, strict=True))
    if settings.get("sym"):
        most = torch.maximum(most, -least)
        least = -most
    scale = ((most - least.clamp(max=0)) / (2**n_bits - 1)).half().float()
    zero = (-least.clamp(max=0) / scale).round()
    return scale, torch.full_like(zero, 2 ** (n_bits - 1)) if settings.get("sym") else zero


def wide() -> Any:
    values = torch.randn(WIDE, generator=torch.Generator().manual_seed(6)) * 0.05 + 0.01
    values[::7] = values[::7].abs()
    return values


def gptq(name: str) -> tuple[dict[str, Any], Tensors]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
    from gptqmodel.quantization.config import QuantizeConfig  # type: ignore[import-not-found]
    from gptqmodel.utils.model import (  # type: ignore[import-not-found]
        convert_gptq_v1_to_v2_format_module,
        convert_gptq_v2_to_v1_format_module,
    )

    settings, values = {"desc_act": False, "checkpoint_format": "gptq", **GPTQ[name]}, wide()
    own = {key: settings[key] for key in ("bits", "group_size", "sym", "desc_act")}
    size = own["group_size"] if own["group_size"] > 0 else WIDE[1]
    order = torch.arange(WIDE[1]) // size
    if own["desc_act"]:
        order = order[torch.randperm(WIDE[1], generator=torch.Generator().manual_seed(7))]
    scale, zero = limits(values[:, order.argsort()], own)
    linear = torch.nn.Linear(WIDE[1], WIDE[0], bias=False)
    linear.weight.data = values
    layer = TorchLinear(in_features=WIDE[1], out_features=WIDE[0], **own)
    layer.pack_original(linear, scale, zero, order.to(torch.int32))
    layer.post_init()
    if settings["checkpoint_format"] == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(**own))
    keys = ("qweight", "qzeros", "scales", "g_idx")
    stored = {key: getattr(layer, key).clone() for key in keys}
    if settings["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, own["bits"], torch.int32)
    config = {"quant_method": "gptq", **settings}
    return config, {**stored, "expected": layer.dequantize_weight().T}


def awq() -> tuple[dict[str, Any], Tensors]:
    from awq.modules.linear.gemm import WQLinear_GEMM  # type: ignore[import-not-found]
    from awq.utils.packing_utils import dequantize_gemm  # type: ignore[import-not-found]

    values, own = wide(), {"bits": 4, "group_size": 32}
    scale, zero = (each.T.contiguous() for each in limits(values, own))
    linear = torch.nn.Linear(WIDE[1], WIDE[0], bias=False)
    linear.weight.data = values
    layer = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scale, zeros=zero)
    stored = {key: getattr(layer, key) for key in ("qweight", "qzeros", "scales")}
    expected = dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"], 4, 32)
    config = {"quant_method": "awq", "version": "gemm", "zero_point": True, **own}
    return config, {**stored, "expected": expected.T}


def bitsandbytes(name: str) -> tuple[dict[str, Any], Tensors]:
    """Without double quantisation, in rows that are not a multiple of a block. The package's CPU
    path uses wrong scales for these: its error is twice that of the path for any device."""
    from bitsandbytes import functional  # type: ignore[import-not-found]
    from bitsandbytes.backends.default import ops  # type: ignore[import-not-found]

    kind = getattr(torch, STORED.get(name, "float16"))
    is_nested = BITSANDBYTES[name]["compress_statistics"]
    values = wide()[:, : 64 if is_nested else 48].to(kind)
    storage = kind if name == "bnb-nf4-half" else torch.uint8
    how = {"blocksize": 64, "quant_storage": storage, **BITSANDBYTES[name]}
    packed, state = functional.quantize_4bit(values.contiguous(), **how)
    stored = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    if is_nested:
        expected = functional.dequantize_4bit(packed, state)
    else:
        how = {"blocksize": 64, "shape": state.shape, "dtype": kind}
        expected = ops._dequantize_4bit_compute(packed[:, 0], state.absmax, state.code, **how)
    stored |= {"weight": packed, "expected": expected}
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, stored


def eight_bits() -> tuple[dict[str, Any], Tensors]:
    from bitsandbytes import functional

    numbers, scale, _ = functional.int8_vectorwise_quant(wide().half())
    stored = {"weight": numbers, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    expected = functional.int8_vectorwise_dequant(numbers, scale)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return config, {**stored, "expected": expected}


def save(name: str, config: dict[str, Any], stored: Tensors) -> None:
    tensors = {key: value.detach().contiguous() for key, value in stored.items()}
    save_file(tensors, FOLDER / f"{name}.safetensors", {"config": json.dumps(config)})
    print(name, {key: (str(value.dtype), *value.shape) for key, value in tensors.items()})


def mlx(n_bits: int, mode: str = "affine", group_size: int = 32) -> None:
    import mlx.core as mx  # type: ignore[import-not-found]

    how = {"group_size": group_size, "bits": n_bits, "mode": mode}
    values = mx.random.normal(WIDE, key=mx.random.key(6)) * 0.05 + 0.01
    stored = dict(zip(("weight", "scales", "biases"), mx.quantize(values, **how), strict=False))
    stored["expected"] = mx.dequantize(*stored.values(), **how)
    name = f"mlx-{n_bits if mode == 'affine' else mode}"
    mx.save_safetensors(str(FOLDER / f"{name}.safetensors"), stored, {"config": json.dumps(how)})


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    if sys.argv[1:] == ["int4-order"]:
        save("int4-order", *ordered())
        return
    if sys.argv[1:] == ["gptq"]:
        for name in GPTQ:
            save(name, *gptq(name))
        return
    if sys.argv[1:] == ["awq"]:
        save("awq", *awq())
        return
    if sys.argv[1:] == ["bnb"]:
        for name in BITSANDBYTES:
            save(name, *bitsandbytes(name))
        save("bnb-8", *eight_bits())
        return
    if sys.argv[1:] == ["mlx"]:
        for n_bits in (2, 3, 4, 5, 6, 8):
            mlx(n_bits)
        mlx(4, "mxfp4")
        mlx(8, "mxfp8")
        mlx(4, "nvfp4", group_size=16)
        return
    for name in FORMATS:
        save(name, *compressed(name))
    for algorithm in ("NVFP4", "mxfp4", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        save(f"{algorithm.partition('_')[0].lower()}-modelopt", *modelopt(algorithm))
    save("fp8-fbgemm", *fbgemm())


if __name__ == "__main__":
    main()
