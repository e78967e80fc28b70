"""Makes `tests/data/quantised`: small weights as quantisers store them, and the values that the
same package makes of what it stored.

`python -m tools.reference.make_quantised_data` in an environment with PyTorch, transformers,
compressed-tensors 0.20 and nvidia-modelopt; the tests need none of them. With `int4-order` it makes
that case alone, by compressed-tensors 0.11: later releases have no order of columns.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[2] / "tests/data/quantised"
SHAPE = (36, 64)
"""The rows are no whole number of I32 with eight numbers in each."""
PACKED = "pack-quantized"
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": (PACKED, {"num_bits": 4, "group_size": 32}),
    "int4-zero": (PACKED, {"num_bits": 4, "group_size": 16, "symmetric": False}),
    "int4-rows-zero": (PACKED, {"num_bits": 4, "group_size": -1, "symmetric": False}),
    "int2": (PACKED, {"num_bits": 2, "group_size": 32}),
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
"""With scales in float32; the package computes in their type."""

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
    state, arguments = {"weight": weight()}, QuantizationArgs(**settings)
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
    """What transformers' layer gives for the columns of a unit matrix, by the way that needs no GPU
    but is taken for one of Intel's."""
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


def save(name: str, config: dict[str, Any], stored: Tensors) -> None:
    tensors = {key: value.detach().contiguous() for key, value in stored.items()}
    save_file(tensors, FOLDER / f"{name}.safetensors", {"config": json.dumps(config)})
    print(name, {key: (str(value.dtype), *value.shape) for key, value in tensors.items()})


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    if sys.argv[1:] == ["int4-order"]:
        save("int4-order", *ordered())
        return
    for name in FORMATS:
        save(name, *compressed(name))
    for algorithm in ("NVFP4", "mxfp4", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        save(f"{algorithm.partition('_')[0].lower()}-modelopt", *modelopt(algorithm))
    save("fp8-fbgemm", *fbgemm())


if __name__ == "__main__":
    main()
