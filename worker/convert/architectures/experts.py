"""Decoders with attention and experts in each layer, or in all but the first ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures.dense import (
    GRANITE,
    HUNYUAN,
    LLAMA,
    OLMO2,
    QWEN2,
    QWEN3,
    QWEN3_VL,
)
from worker.convert.config import Config
from worker.convert.family.dims import Dims, with_experts
from worker.convert.family.metadata import SHARED_WIDTH, as_deepseek, integer, of_dims, rotated
from worker.convert.family.rules import Array, Family, Into, Make, Sources, halves


def half(i: int) -> Make:
    """Gate (0) or up (1) of an expert, stored as (inputs, outputs) or as (outputs, inputs)."""

    def make(sources: Sequence[Array], d: Dims) -> Array:
        both = sources[0].T if sources[0].shape[0] == d.n_embd else sources[0]
        return np.split(both, 2)[i]

    return make


def down(sources: Sequence[Array], d: Dims) -> Array:
    return sources[0].T if sources[0].shape[-1] == d.n_embd else sources[0]


def halves_of(experts: str) -> Sources:
    return {
        f"{experts}.gate_up_proj": (
            Into("ffn_gate_exps", make=half(0), per_expert=True),
            Into("ffn_up_exps", make=half(1), per_expert=True),
        ),
        f"{experts}.down_proj": Into("ffn_down_exps", make=down, per_expert=True),
    }


MIXTRAL = replace(
    LLAMA,
    names=("MixtralForCausalLM",),
    dims=with_experts("num_local_experts", width="intermediate_size"),
    needs="ffn_gate_exps",
)

OLMOE = replace(
    OLMO2,
    architecture="olmoe",
    names=("OlmoeForCausalLM",),
    dims=with_experts("num_experts", width="intermediate_size"),
    requires={
        "hidden_act": "silu",
        "norm_topk_prob": False,
        "num_key_value_heads": lambda d: d.n_head,
        "clip_qkv": None,
    },
)

# --- Qwen --------------------------------------------------------------------------------------

_SPARSE = {
    **QWEN2.requires,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": ([], None),
}

QWEN2_MOE = replace(
    QWEN2,
    architecture="qwen2moe",
    names=("Qwen2MoeForCausalLM",),
    metadata=SHARED_WIDTH,
    dims=with_experts("num_experts", shared_width="shared_expert_intermediate_size"),
    head="always",
    requires={**_SPARSE, "norm_topk_prob": False},
)

QWEN3_MOE = replace(
    QWEN3,
    architecture="qwen3moe",
    names=("Qwen3MoeForCausalLM",),
    dims=with_experts("num_local_experts"),
    requires={**_SPARSE, "norm_topk_prob": True},
)

QWEN3_VL_MOE = replace(
    QWEN3_VL,
    architecture="qwen3vlmoe",
    multimodal=("Qwen3VLMoeForConditionalGeneration",),
    dims=QWEN3_MOE.dims,
    sources=halves_of("mlp.experts"),
    requires=QWEN3_MOE.requires,
)

# --- experts whose router has a bias --------------------------------------------------------------

MINIMAX_M2 = Family(
    "minimax-m2",
    ("MiniMaxM2ForCausalLM",),
    metadata={
        Keys.Rope.DIMENSION_COUNT: lambda config, d: config.integer(
            "rotary_dim", default=rotated(config, d.head_dim, 1.0)
        ),
        Keys.LLM.EXPERT_GATING_FUNC: 2,  # Sigmoid.
    },
    dims=with_experts("num_local_experts", width="intermediate_size"),
    requires={"hidden_act": "silu", "use_qk_norm": True, "scoring_func": "sigmoid"},
)

GLM4_MOE = Family(
    "glm4moe",
    ("Glm4MoeForCausalLM",),
    rotary=0.5,
    metadata=as_deepseek(gating=2),
    dims=with_experts(
        "n_routed_experts", n_shared="n_shared_experts", n_dense="first_k_dense_replace"
    ),
    ignores_extra_layers=True,
    requires={"hidden_act": "silu", "n_group": 1},
    needs="-attn_output.bias exp_probs_b.bias",
)

SOLAR_OPEN = replace(GLM4_MOE, names=("SolarOpenForCausalLM",), rotary=1.0)

DOTS1 = replace(
    GLM4_MOE,
    architecture="dots1",
    names=("Dots1ForCausalLM",),
    rotary=None,
    requires={**GLM4_MOE.requires, "num_key_value_heads": lambda d: d.n_head},
)

HUNYUAN_MOE = replace(
    HUNYUAN,
    architecture="hunyuan-moe",
    names=("HunYuanMoEV1ForCausalLM",),
    metadata={**HUNYUAN.metadata, **SHARED_WIDTH},
    n_used="moe_topk",
    dims=with_experts("num_experts", width="intermediate_size", shared_width="intermediate_size"),
)

EXAONE_MOE = replace(
    GLM4_MOE,
    architecture="exaone-moe",
    names=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    rotary=None,
    windows=4,
    metadata={
        **GLM4_MOE.metadata,
        Keys.LLM.EXPERT_SHARED_COUNT: integer("num_shared_experts"),
        **SHARED_WIDTH,
    },
    dims=with_experts(
        "num_experts", n_shared="num_shared_experts", n_dense="first_k_dense_replace"
    ),
    ropes=("default",),
)

ERNIE4_5_MOE = Family(
    "ernie4_5-moe",
    ("Ernie4_5_MoeForCausalLM",),
    metadata={
        Keys.LLM.EXPERT_SHARED_COUNT: integer("moe_num_shared_experts"),
        **SHARED_WIDTH,
        Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: 1,
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: of_dims(lambda d: d.kinds.count("dense")),
    },
    n_used="moe_k",
    dims=with_experts(
        "moe_num_experts", n_shared="moe_num_shared_experts", n_dense="moe_layer_start_index"
    ),
    requires={
        "hidden_act": "silu",
        "use_bias": False,
        "moe_layer_interval": 1,
        "moe_layer_end_index": lambda d: (d.n_layers - 1, -1),
    },
    needs="ffn_gate_exps exp_probs_b.bias",
)

# --- experts in one tensor ------------------------------------------------------------------------

GRANITE_MOE = replace(
    GRANITE,
    architecture="granitemoe",
    names=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    sources={
        "block_sparse_moe.input_linear.weight": halves("_exps"),
        "shared_mlp.input_linear.weight": halves("_shexp"),
    },
    metadata={
        **GRANITE.metadata,
        Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: of_dims(
            lambda d: d.n_ff_shared if d.n_expert else None
        ),
    },
    dims=with_experts(
        "num_local_experts",
        width="intermediate_size",
        shared_width="shared_intermediate_size",
        optional=True,
    ),
)


def _llama4_dims(config: Config) -> Dims:
    d, step = Dims.of(config), config.integer("interleave_moe_layer_step", default=1)
    kinds = tuple("experts" if (i + 1) % step == 0 else "dense" for i in range(d.n_layers))
    return replace(d, n_ff=config.integer("intermediate_size_mlp"), kinds=kinds)


LLAMA4 = Family(
    "llama4",
    ("Llama4ForCausalLM",),
    multimodal=("Llama4ForConditionalGeneration",),
    sources={**halves_of("feed_forward.experts"), "feed_forward.down_proj.weight": "ffn_down"},
    metadata={Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: integer("interleave_moe_layer_step", default=1)},
    dims=with_experts(
        "num_local_experts",
        width="intermediate_size",
        shared_width="intermediate_size",
        of=_llama4_dims,
    ),
    scales_as_llama3=True,
    requires={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": lambda d: d.n_expert != 128,
        "no_rope_layers": lambda d: ([int((i + 1) % 4 != 0) for i in range(d.n_layers)], []),
    },
    needs="-attn_q_norm -attn_k_norm",
)
