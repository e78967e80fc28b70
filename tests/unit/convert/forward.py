"""A Llama forward pass in plain NumPy, straight from a BF16 SafeTensors file.

Written from the architecture's description and sharing nothing with the converter, so that a
mistake there has no twin here. ggml rounds the input of each matrix product to the type of the
weights; `bf16_inputs` does the same, so that only what is not rounding shows as a difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.unit.convert.files import read

Array = npt.NDArray[np.float32]


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """`config.json` and all tensors in float32."""
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Array] = {}
    header, data = read(folder / "model.safetensors")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16"
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(data[begin:end], dtype="<u2").astype(np.uint32) << 16
        weights[name] = bits.view(np.float32).reshape(entry["shape"])
    return config, weights


def logits(folder: Path, tokens: Sequence[int], *, bf16_inputs: bool = False) -> Array:
    """One row of logits per token."""
    config, w = load(folder)

    def product(inputs: Array, name: str) -> Array:
        rounded = _to_bf16(inputs) if bf16_inputs else inputs
        return np.asarray(rounded @ w[name].T, dtype=np.float32)

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["head_dim"]
    cos, sin = _rotations(len(tokens), size, config["rope_theta"])
    x = w["model.embed_tokens.weight"][list(tokens)]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = _rms_norm(x, w[p + "input_layernorm.weight"], config["rms_norm_eps"])
        q = _heads(product(h, p + "self_attn.q_proj.weight"), heads, size)
        k = _heads(product(h, p + "self_attn.k_proj.weight"), kv_heads, size)
        v = _heads(product(h, p + "self_attn.v_proj.weight"), kv_heads, size)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        a = _attend(q, np.repeat(k, heads // kv_heads, 0), np.repeat(v, heads // kv_heads, 0))
        x = x + product(a, p + "self_attn.o_proj.weight")
        h = _rms_norm(x, w[p + "post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate = product(h, p + "mlp.gate_proj.weight")
        up = product(h, p + "mlp.up_proj.weight")
        x = x + product(gate / (1 + np.exp(-gate)) * up, p + "mlp.down_proj.weight")
    x = _rms_norm(x, w["model.norm.weight"], config["rms_norm_eps"])
    tied = config["tie_word_embeddings"]
    return product(x, "model.embed_tokens.weight" if tied else "lm_head.weight")


def _to_bf16(x: Array) -> Array:
    """Rounded to the nearest value whose lower 16 bits are zero, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return np.asarray(x / scale * weight, dtype=np.float32)


def _heads(x: Array, n: int, size: int) -> Array:
    return x.reshape(len(x), n, size).transpose(1, 0, 2)


def _rotations(n: int, size: int, theta: float) -> tuple[Array, Array]:
    frequencies = 1.0 / theta ** (np.arange(0, size, 2) / size)
    angles = np.concatenate([np.outer(np.arange(n), frequencies)] * 2, axis=-1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    turned = np.concatenate([-second, first], axis=-1)
    return np.asarray(x * cos + turned * sin, dtype=np.float32)


def _attend(q: Array, k: Array, v: Array) -> Array:
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(np.float32(q.shape[-1]))
    scores += np.where(np.tri(q.shape[1], dtype=bool), np.float32(0), np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = (weights @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)
    return np.asarray(mixed, dtype=np.float32)
