"""LFM 2: short convolutions alternating with attention; some models have experts."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.layers import EXPERTS, GATED, HEAD_NORMS, leading_dense
from worker.convert.family.metadata import by_kind, number, of_dims
from worker.convert.family.rules import Family
from worker.convert.family.sizes import EMBD, Dims, size


def _dims(config: Config) -> Dims:
    n_ff = config.integer("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", default=True):
        n_ff = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * n_ff / 3))
        multiple = config.integer("block_multiple_of", default=256)
        n_ff = -(-n_ff // multiple) * multiple
    kinds = tuple("conv" if kind == "conv" else "attention" for kind in config.items("layer_types"))
    more = {"cache": config.integer("conv_L_cache")}
    sized = Config({**config.values, "intermediate_size": n_ff}, config.name)
    return replace(Dims.of(sized), kinds=kinds, more=more)


_LAYERS = {
    "": "attn_norm ffn_norm",
    "attention": f"attn_q attn_k attn_v attn_output {HEAD_NORMS}",
    "conv": "shortconv.conv shortconv.in_proj shortconv.out_proj",
}

LFM2 = Family(
    "lfm2",
    ("Lfm2ForCausalLM",),
    {**_LAYERS, "": f"{_LAYERS['']} {GATED}"},
    model="token_embd token_embd_norm output?",
    sources={
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.{e}.w1",
        "ffn_up_exps": "feed_forward.experts.{e}.w3",
        "ffn_down_exps": "feed_forward.experts.{e}.w2",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
    shapes={
        "shortconv.conv": (EMBD, size("cache")),
        "shortconv.in_proj": (3 * EMBD, EMBD),
        "shortconv.out_proj": (EMBD, EMBD),
    },
    norm="none",
    metadata={
        Keys.Attention.HEAD_COUNT_KV: by_kind("attention", lambda d: d.n_head_kv),
        Keys.ShortConv.L_CACHE: of_dims(lambda d: d.more["cache"]),
        Keys.Attention.LAYERNORM_RMS_EPS: number("norm_eps", default=1e-5),
    },
    dims=_dims,
    requires={"conv_bias": False},
)


def _moe_dims(config: Config) -> Dims:
    d = _dims(Config({**config.values, "block_auto_adjust_ff_dim": False}, config.name))
    widths = leading_dense(d.n_layers, int(config.number("num_dense_layers")))
    return replace(
        d,
        n_expert=config.integer("num_experts", "num_local_experts"),
        n_ff_expert=config.integer("moe_intermediate_size"),
        kinds=tuple(f"{kind} {width}" for kind, width in zip(d.kinds, widths, strict=True)),
    )


LFM2_MOE = replace(
    LFM2,
    architecture="lfm2moe",
    names=("Lfm2MoeForCausalLM",),
    layers={**_LAYERS, "dense": GATED, "experts": f"{EXPERTS} exp_probs_b.bias"},
    metadata={
        **LFM2.metadata,
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: of_dims(
            lambda d: sum("dense" in kind.split() for kind in d.kinds)
        ),
        Keys.LLM.EXPERT_GATING_FUNC: 2,  # Sigmoid.
    },
    dims=_moe_dims,
    requires={
        "conv_bias": False,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
)
