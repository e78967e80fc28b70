"""Falcon-H1: a Mamba 2 mixer beside attention. Its multipliers are applied to the weights here, as
llama.cpp has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from worker.convert.config import Config
from worker.convert.family import state_space
from worker.convert.family.layers import GATED
from worker.convert.family.rules import Array, Family
from worker.convert.family.sizes import Dims
from worker.convert.quantize import to_float32


def _dims(config: Config) -> Dims:
    d = state_space.with_sizes(Dims.of(config), config, config.integer("mamba_n_heads"))
    return replace(d, scales=_scales(config))


def _scales(config: Config) -> dict[str, tuple[float, ...]]:
    """By the tensor that is multiplied."""
    attention = config.number("attention_in_multiplier", default=1.0)
    mlp = config.values.get("mlp_multipliers") or [1.0, 1.0]
    return {
        "token_embd": (config.number("embedding_multiplier", default=1.0),),
        "output": (config.number("lm_head_multiplier", default=1.0),),
        "attn_q": (attention,),
        "attn_k": (attention * config.number("key_multiplier", default=1.0),),
        "attn_v": (attention,),
        "attn_output": (config.number("attention_out_multiplier", default=1.0),),
        "ffn_gate": (float(mlp[0]),),
        "ffn_down": (float(mlp[1]),),
        "ssm_out": (config.number("ssm_out_multiplier", default=1.0),),
        "ssm_in": tuple(
            config.number("ssm_in_multiplier", default=1.0) * float(x)
            for x in config.values.get("ssm_multipliers") or [1.0] * 5
        ),
    }


def _scaled_input(sources: Sequence[Array], d: Dims) -> Array:
    """The input projection, whose rows for z, x, B, C and dt each have their own multiplier."""
    inner, side = d.more["inner"], d.more["groups"] * d.more["state"]
    sizes = (inner, inner, side, side, d.more["heads"])
    factors = np.repeat(np.asarray(d.scales["ssm_in"], dtype=np.float32), sizes)
    return sources[0] if (factors == 1).all() else to_float32(sources[0]) * factors[:, None]


_SCALED = "token_embd output attn_q attn_k attn_v attn_output ffn_gate ffn_down ssm_out".split()

FALCON_H1 = Family(
    "falcon-h1",
    ("FalconH1ForCausalLM",),
    f"attn_norm attn_q attn_k attn_v attn_output =ffn_norm {GATED} {state_space.MAMBA2}?",
    sources={
        **state_space.SOURCES,
        "output_norm": "model.final_layernorm",
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    scaled=frozenset(_SCALED),
    makes={"ssm_in": _scaled_input},
    metadata=state_space.METADATA,
    dims=_dims,
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
        "projectors_bias": False,
    },
)
