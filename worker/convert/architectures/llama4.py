"""Llama 4's text part: experts in every layer or every other, windows in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.layers import EXPERTS, GATED, SHARED
from worker.convert.family.metadata import integer, llama3_factors, require
from worker.convert.family.rules import Array, Family, From, Make, transposed
from worker.convert.family.sizes import Dims


def _dims(config: Config) -> Dims:
    d = Dims.of(config)
    step = config.integer("interleave_moe_layer_step", default=1)
    kinds = tuple("experts" if (i + 1) % step == 0 else "dense" for i in range(d.n_layers))
    return replace(
        d,
        n_ff=config.integer("intermediate_size_mlp"),
        n_expert=config.integer("num_local_experts"),
        n_ff_expert=d.n_ff,
        n_ff_shared=d.n_ff,
        kinds=kinds,
    )


def _half(first: bool) -> Make:
    """Gate (the first half) or up of an expert's outputs; stored as (inputs, outputs)."""

    def make(sources: Sequence[Array], d: Dims) -> Array:
        columns = slice(0, d.n_ff_expert) if first else slice(d.n_ff_expert, None)
        return np.ascontiguousarray(sources[0][:, columns].T)

    return make


def _check(config: Config, d: Dims) -> None:
    pattern = [int((i + 1) % 4 != 0) for i in range(d.n_layers)]
    require(config, use_qk_norm=d.n_expert != 128, no_rope_layers=(pattern, []))


_EXPERTS = "feed_forward.experts"

LLAMA4 = Family(
    "llama4",
    ("Llama4ForCausalLM",),
    {
        "": "attn_norm attn_q attn_k attn_v attn_output ffn_norm",
        "dense": GATED,
        "experts": f"{EXPERTS} {SHARED}",
    },
    multimodal=("Llama4ForConditionalGeneration",),
    sources={
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
        "ffn_gate_exps": From(f"{_EXPERTS}.gate_up_proj", make=_half(True), per_expert=True),
        "ffn_up_exps": From(f"{_EXPERTS}.gate_up_proj", make=_half(False), per_expert=True),
        "ffn_down_exps": From(f"{_EXPERTS}.down_proj", make=transposed, per_expert=True),
        "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
    },
    metadata={Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: integer("interleave_moe_layer_step", default=1)},
    dims=_dims,
    scales_as_llama3=True,
    extra_tensors=llama3_factors,
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    check=_check,
)
