"""LFM 2: short convolutions alternating with attention; some models have experts."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks, experts, shapes
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules
from worker.convert.architectures.state_space import as_stored
from worker.convert.config import Config

_FEED_FORWARD = f"{blocks.LAYER}.feed_forward"


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


def _metadata(arch: str, config: Config, d: Dims) -> Metadata:
    found = blocks.common_metadata(arch, config, d)
    found[Keys.Attention.HEAD_COUNT_KV] = [
        d.n_head_kv if "attention" in kind.split() else 0 for kind in d.kinds
    ]
    found[Keys.ShortConv.L_CACHE] = d.more["cache"]
    found[Keys.Attention.LAYERNORM_RMS_EPS] = config.number("norm_eps", default=1e-5)
    return found


_RULES: Rules = {
    "model.embed_tokens.weight": Rule("token_embd.weight", shapes.by_token),
    "model.embedding_norm.weight": blocks.norm("token_embd_norm"),
    "lm_head.weight": Rule("output.weight", shapes.by_token, optional=True),
    **blocks.norms(operator_norm="attn_norm", ffn_norm="ffn_norm"),
    **experts.only(
        "attention",
        blocks.attention(biases=False, output="out_proj"),
        blocks.head_norms("layernorm"),
    ),
    **experts.only(
        "conv",
        {
            f"{blocks.LAYER}.conv.conv.weight": Rule(
                "blk.{i}.shortconv.conv.weight",
                lambda d: (d.n_embd, d.more["cache"]),
                make=as_stored,
                keep_f32=True,
            ),
            **blocks.weights(
                f"{blocks.LAYER}.conv",
                {
                    "in_proj": ("shortconv.in_proj", shapes.three_squares),
                    "out_proj": ("shortconv.out_proj", shapes.square),
                },
            ),
        },
    ),
}
_GATED = ("w1", "w3", "w2")
_DENSE = blocks.gated_mlp(_FEED_FORWARD, _GATED)

LFM2 = Family(
    architecture="lfm2",
    names=("Lfm2ForCausalLM",),
    rules={**_RULES, **_DENSE},
    metadata=_metadata,
    dims=_dims,
    check=blocks.requires(conv_bias=False),
)


def _moe_dims(config: Config) -> Dims:
    d = _dims(Config({**config.values, "block_auto_adjust_ff_dim": False}, config.name))
    widths = experts.leading_dense(d.n_layers, int(config.number("num_dense_layers")))
    return replace(
        d,
        n_expert=config.integer("num_experts", "num_local_experts"),
        n_ff_expert=config.integer("moe_intermediate_size"),
        kinds=tuple(f"{kind} {width}" for kind, width in zip(d.kinds, widths, strict=True)),
    )


def _moe(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **_metadata(arch, config, d),
        **experts.expert_metadata(config, d),
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: sum("dense" in kind.split() for kind in d.kinds),
        Keys.LLM.EXPERT_GATING_FUNC: 2,  # Sigmoid.
    }


LFM2_MOE = Family(
    architecture="lfm2moe",
    names=("Lfm2MoeForCausalLM",),
    rules={
        **_RULES,
        **experts.only("dense", _DENSE),
        **experts.only(
            "experts",
            experts.router(f"{_FEED_FORWARD}.gate.weight"),
            experts.experts(f"{_FEED_FORWARD}.experts", _GATED),
            experts.score_correction(f"{_FEED_FORWARD}.expert_bias"),
        ),
    },
    metadata=_moe,
    dims=_moe_dims,
    check=blocks.requires(
        conv_bias=False, norm_topk_prob=True, use_expert_bias=True, routed_scaling_factor=1.0
    ),
)

FAMILIES = (LFM2, LFM2_MOE)
