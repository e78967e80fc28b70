"""Nemotron-H: each layer is a Mamba 2 mixer, attention, a feed-forward block or experts."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family import state_space
from worker.convert.family.metadata import (
    SHARED_WIDTH,
    experts,
    flag,
    integer,
    number,
    sizes,
)
from worker.convert.family.rules import Family, Metadata
from worker.convert.family.sizes import Dims
from worker.errors import ModelError

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


def _pattern(config: Config) -> tuple[str, ...]:
    """The kind of each layer: older configurations have letters, newer ones words."""
    letters = config.values.get("hybrid_override_pattern")
    if isinstance(letters, str):
        kinds = [_LETTERS.get(letter, letter) for letter in letters]
    else:
        kinds = [_KINDS.get(str(kind), str(kind)) for kind in config.items("layers_block_type")]
    unknown = set(kinds) - set(_LETTERS.values())
    if unknown:
        raise ModelError(f"{config.name}: layers of kind {min(unknown)!r} cannot be converted")
    return tuple(kinds)


def _has_experts(config: Config) -> bool:
    return "moe" in _pattern(config)


def _dims(config: Config) -> Dims:
    kinds = _pattern(config)
    d = Dims.of(Config({**config.values, "num_hidden_layers": len(kinds)}, config.name))
    d = state_space.with_sizes(d, config, config.integer("mamba_num_heads"))
    if "moe" in kinds:
        d = replace(
            d,
            n_expert=config.integer("n_routed_experts"),
            n_ff_expert=config.integer("moe_intermediate_size"),
            n_ff_shared=config.integer("moe_shared_expert_intermediate_size"),
        )
    return replace(d, kinds=kinds)


def _metadata(family: Family, config: Config, d: Dims) -> Metadata:
    epsilon = config.number("layer_norm_epsilon", "norm_eps", default=1e-5)
    n_ff = d.n_ff_expert or d.n_ff
    return {
        **sizes(d, config.integer("max_position_embeddings")),
        Keys.LLM.FEED_FORWARD_LENGTH: [n_ff if k in ("mlp", "moe") else 0 for k in d.kinds],
        Keys.Attention.HEAD_COUNT_KV: [
            d.n_head_kv if kind == "attention" else 0 for kind in d.kinds
        ],
        Keys.Attention.KEY_LENGTH: d.head_dim,
        Keys.Attention.VALUE_LENGTH: d.head_dim,
        Keys.Attention.LAYERNORM_EPS: epsilon,
        Keys.Attention.LAYERNORM_RMS_EPS: epsilon,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **experts(config, d, family.n_used),
    }


_LAYERS = {
    "": "attn_norm",
    "mamba": state_space.MAMBA2,
    "attention": "attn_q attn_k attn_v attn_output",
}

NEMOTRON_H = Family(
    "nemotron_h",
    ("NemotronHForCausalLM",),
    {**_LAYERS, "mlp": "ffn_up ffn_down"},
    layer="backbone.layers.{i}",
    sources={
        **state_space.sources("mixer"),
        "ffn_up_exps": "mixer.experts.{e}.up_proj",
        "ffn_down_exps": "mixer.experts.{e}.down_proj",
    },
    common=_metadata,
    metadata=state_space.METADATA,
    dims=_dims,
    roots=("backbone.", "model."),
    applies=lambda config: not _has_experts(config),
    requires={
        "mlp_hidden_act": "relu2",
        "use_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
        "use_conv_bias": True,
        "n_group": 1,
        "moe_latent_size": None,
    },
)

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    architecture="nemotron_h_moe",
    layers={
        **_LAYERS,
        "moe": "ffn_gate_inp exp_probs_b.bias ffn_up_exps ffn_down_exps ffn_up_shexp"
        " ffn_down_shexp",
    },
    metadata={
        **state_space.METADATA,
        **SHARED_WIDTH,
        Keys.LLM.EXPERT_SHARED_COUNT: integer("n_shared_experts"),
        Keys.LLM.EXPERT_WEIGHTS_NORM: flag("norm_topk_prob", default=True),
        Keys.LLM.EXPERT_WEIGHTS_SCALE: number("routed_scaling_factor", default=1.0),
    },
    applies=_has_experts,
    ignored=(r"mtp\..*",),
)
