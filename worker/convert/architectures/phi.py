"""Phi-2, Phi-3 and Phi-4, whose q/k/v and gate/up are fused in the form that llama.cpp reads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.architectures import blocks, shapes
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule
from worker.convert.config import Config
from worker.errors import ModelError


def _rope_dims(config: Config, d: Dims) -> int:
    """The number of dimensions of a head that are rotated."""
    factor = config.rope().params.number(
        "partial_rotary_factor", default=config.number("partial_rotary_factor", default=1.0)
    )
    return int(factor * d.head_dim)


def _original_context(config: Config) -> int:
    return config.rope().params.integer(
        "original_max_position_embeddings",
        default=config.integer(
            "original_max_position_embeddings", "max_position_embeddings", default=4096
        ),
    )


def _metadata(_arch: str, config: Config, d: Dims) -> Metadata:
    context = config.integer("max_position_embeddings")
    found: Metadata = {
        **blocks.sizes(d, context),
        Keys.Attention.HEAD_COUNT_KV: d.n_head_kv,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        Keys.Rope.DIMENSION_COUNT: _rope_dims(config, d),
        Keys.Rope.FREQ_BASE: config.rope().theta,
        Keys.Rope.SCALING_ORIG_CTX_LEN: _original_context(config),
        Keys.Attention.SLIDING_WINDOW: int(config.values.get("sliding_window") or 0),
        **blocks.rms_norm(config),
    }
    if _is_long(config):
        scale = context / _original_context(config)
        long = math.sqrt(1 + math.log(scale) / math.log(_original_context(config)))
        found[Keys.Rope.SCALING_ATTN_FACTOR] = long if scale > 1 else 1.0
    return found


def _is_long(config: Config) -> bool:
    return config.rope().kind in ("longrope", "su")


def _factors(config: Config, d: Dims) -> Mapping[str, npt.NDArray[np.float32]]:
    """Divisors of the rotary frequencies: `short` within the original context, `long` beyond it."""
    if not _is_long(config):
        return {}
    found = {}
    for name in ("long", "short"):
        factors = np.array(config.rope().params.items(f"{name}_factor"), dtype=np.float32)
        if factors.shape != (_rope_dims(config, d) // 2,):
            raise ModelError(
                f"{config.name}: {name}_factor must have {_rope_dims(config, d) // 2} numbers, "
                f"one per rotary frequency, not {len(factors)}"
            )
        found[f"rope_factors_{name}.weight"] = factors
    return found


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu")
    if config.rope().kind not in ("default", "longrope", "su"):
        raise ModelError(
            f"{config.name}: rope scaling of type {config.rope().kind!r} is not known for phi3; "
            "default and longrope are"
        )


PHI3 = Family(
    architecture="phi3",
    names=("Phi3ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        f"{blocks.ATTENTION}.qkv_proj.weight": Rule(
            "blk.{i}.attn_qkv.weight", lambda d: (d.q_rows + 2 * d.kv_rows, d.n_embd)
        ),
        f"{blocks.ATTENTION}.o_proj.weight": Rule(
            "blk.{i}.attn_output.weight", lambda d: (d.n_embd, d.q_rows)
        ),
        **blocks.fused_mlp(),
    },
    metadata=_metadata,
    ignores_window=True,
    extra_tensors=_factors,
    check=_check,
)


def _phi2(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata(arch, config, d),
        **blocks.partial_rotary(config, d, 0.5),
        **blocks.layer_norm_epsilon(config),
    }


PHI2 = Family(
    architecture="phi2",
    names=("PhiForCausalLM",),
    rules={
        **blocks.embeddings(last_norm="model.final_layernorm"),
        "lm_head.bias": Rule("output.bias", lambda d: (d.n_vocab,)),
        "model.final_layernorm.bias": blocks.norm("output_norm", bias=True),
        **blocks.layer_norm(f"{blocks.LAYER}.input_layernorm", "blk.{i}.attn_norm"),
        **blocks.attention(output="dense"),
        **blocks.linear(f"{blocks.MLP}.fc1", "blk.{i}.ffn_up", shapes.up),
        **blocks.linear(f"{blocks.MLP}.fc2", "blk.{i}.ffn_down", shapes.down),
    },
    metadata=_phi2,
    head="always",
    check=blocks.requires(hidden_act=("gelu_new", "gelu_pytorch_tanh"), qk_layernorm=False),
)

FAMILIES = (PHI2, PHI3)
