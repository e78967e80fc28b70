"""Granite: Llama's blocks with additional scales; dense, with experts, and with state spaces."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family import state_space
from worker.convert.family.layers import ATTENTION, EXPERTS, SHARED
from worker.convert.family.metadata import (
    by_kind,
    llama3_factors,
    number,
    of_dims,
    require,
)
from worker.convert.family.rules import Family, From, Sources
from worker.convert.family.sizes import FF_EXPERT, FF_SHARED, Dims, fixed
from worker.errors import ModelError

_FUSED = "block_sparse_moe.input_linear.weight"
_FUSED_SHARED = "shared_mlp.input_linear.weight"
_SOURCES: Sources = {
    "ffn_gate_exps": From(_FUSED, rows=(fixed(0), FF_EXPERT)),
    "ffn_up_exps": From(_FUSED, rows=(FF_EXPERT, FF_EXPERT)),
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": From(_FUSED_SHARED, rows=(fixed(0), FF_SHARED)),
    "ffn_up_shexp": From(_FUSED_SHARED, rows=(FF_SHARED, FF_SHARED)),
}

GRANITE = Family(
    "granite",
    ("GraniteForCausalLM",),
    f"attn_norm {ATTENTION} ffn_norm ffn_gate~ ffn_up~ ffn_down~",
    interleaved=True,
    metadata={
        Keys.Attention.SCALE: number("attention_multiplier", default=1.0),
        Keys.LLM.EMBEDDING_SCALE: number("embedding_multiplier", default=1.0),
        Keys.LLM.RESIDUAL_SCALE: number("residual_multiplier", default=1.0),
        Keys.LLM.LOGIT_SCALE: number("logits_scaling", default=1.0),
    },
    scales_as_llama3=True,
    extra_tensors=llama3_factors,
)


def _dims(config: Config) -> Dims:
    d = Dims.of(config)
    return replace(
        d,
        n_expert=int(config.values.get("num_local_experts") or 0),
        n_ff_expert=d.n_ff,
        n_ff_shared=int(config.values.get("shared_intermediate_size") or 0),
    )


GRANITE_MOE = replace(
    GRANITE,
    architecture="granitemoe",
    names=("GraniteMoeForCausalLM",),
    layers=f"attn_norm {ATTENTION} ffn_norm {EXPERTS}",
    sources=_SOURCES,
    metadata={
        **GRANITE.metadata,
        Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: of_dims(
            lambda d: d.n_ff_shared if d.n_expert else None
        ),
    },
    dims=_dims,
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    names=("GraniteMoeSharedForCausalLM",),
    layers=f"{GRANITE_MOE.layers} {SHARED}",
)


def _hybrid_dims(config: Config) -> Dims:
    given = map(str, config.items("layer_types"))
    kinds = tuple("attention" if "att" in k and "linear" not in k else "mamba" for k in given)
    d = replace(_dims(config), kinds=kinds)
    return state_space.with_sizes(d, config, config.integer("mamba_n_heads"))


def _check_hybrid(config: Config, d: Dims) -> None:
    require(config, position_embedding_type="nope")
    if d.more["inner"] != 2 * d.n_embd:
        raise ModelError(f"{config.name}: llama.cpp's granitehybrid has mamba_expand 2 only")


GRANITE_HYBRID = replace(
    GRANITE_MOE,
    architecture="granitehybrid",
    names=("GraniteMoeHybridForCausalLM",),
    layers={
        "": f"attn_norm ffn_norm {EXPERTS} {SHARED}",
        "attention": "attn_q attn_k attn_v attn_output",
        "mamba": state_space.MAMBA2,
    },
    sources={**_SOURCES, **state_space.SOURCES},
    metadata={
        **GRANITE_MOE.metadata,
        **state_space.METADATA,
        Keys.Attention.HEAD_COUNT_KV: by_kind("attention", lambda d: d.n_head_kv),
        Keys.Rope.SCALING_FINETUNED: False,  # Switches off all rotation.
        Keys.LLM.FEED_FORWARD_LENGTH: of_dims(lambda d: d.n_ff if d.n_expert else d.n_ff_shared),
    },
    dims=_hybrid_dims,
    scales_as_llama3=False,
    extra_tensors=lambda config, d: {},
    check=_check_hybrid,
)
