"""Decoders whose layers are of several kinds: attention, Mamba 2 mixers, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures.dense import PLAIN_ATTENTION
from worker.convert.architectures.experts import GRANITE_MOE
from worker.convert.config import Config
from worker.convert.family.dims import EXPERTS, GATED, HEAD_NORMS, SHARED, Dims, leading_dense
from worker.convert.family.metadata import (
    SHARED_WIDTH,
    by_kind,
    experts,
    flag,
    integer,
    number,
    of_dims,
    sizes,
)
from worker.convert.family.rules import Array, Family, Make, Metadata, Setting, decay
from worker.errors import ModelError

# --- state spaces ------------------------------------------------------------------------------

_MAMBA2 = "ssm_in ssm_conv1d+ ssm_dt.bias =ssm_a =ssm_d ssm_out ssm_norm"
"""One mixer; published models have no biases of the projections."""
_STATE_SPACE: Mapping[str, Setting] = {
    Keys.SSM.CONV_KERNEL: of_dims(lambda d: d.more["kernel"]),
    Keys.SSM.INNER_SIZE: of_dims(lambda d: d.more["inner"]),
    Keys.SSM.STATE_SIZE: of_dims(lambda d: d.more["state"]),
    Keys.SSM.TIME_STEP_RANK: of_dims(lambda d: d.more["heads"]),
    Keys.SSM.GROUP_COUNT: of_dims(lambda d: d.more["groups"]),
}


def _column(sources: Sequence[Array], _d: Dims) -> Array:
    return sources[0].reshape(-1, 1)


def _by_group(sources: Sequence[Array], d: Dims) -> Array:
    return sources[0].reshape(d.more["groups"], -1)


_MAKES: Mapping[str, Make] = {
    "ssm_a": lambda sources, d: decay([_column(sources, d)], d),
    "ssm_d": _column,
    "ssm_norm": _by_group,
}


def _with_state_space(d: Dims, config: Config, n_heads: int) -> Dims:
    sizes = {
        "heads": n_heads,
        "inner": n_heads * config.integer("mamba_d_head", "mamba_head_dim", "head_dim"),
        "state": config.integer("mamba_d_state", "ssm_state_size", "state_size"),
        "groups": config.integer("mamba_n_groups", "n_groups", default=1),
        "kernel": config.integer("mamba_d_conv", "conv_kernel", default=4),
    }
    return replace(d, more={**d.more, **sizes})


def _granite_dims(config: Config) -> Dims:
    given = map(str, config.items("layer_types"))
    kinds = tuple("attention" if "att" in k and "linear" not in k else "mamba" for k in given)
    d = replace(GRANITE_MOE.dims(config), kinds=kinds)
    return _with_state_space(d, config, config.integer("mamba_n_heads"))


def _check_granite(config: Config, d: Dims) -> None:
    if d.more["inner"] != 2 * d.n_embd:
        raise ModelError(f"{config.name}: llama.cpp's granitehybrid has mamba_expand 2 only")


GRANITE_HYBRID = replace(
    GRANITE_MOE,
    architecture="granitehybrid",
    names=("GraniteMoeHybridForCausalLM",),
    layers={
        "": f"attn_norm ffn_norm {EXPERTS} {SHARED}",
        "attention": PLAIN_ATTENTION,
        "mamba": _MAMBA2,
    },
    sources={**GRANITE_MOE.sources, "ssm_dt.bias": "mamba.dt_bias"},
    makes=_MAKES,
    metadata={
        **GRANITE_MOE.metadata,
        **_STATE_SPACE,
        Keys.Attention.HEAD_COUNT_KV: by_kind("attention", lambda d: d.n_head_kv),
        Keys.Rope.SCALING_FINETUNED: False,  # Switches off all rotation.
        Keys.LLM.FEED_FORWARD_LENGTH: of_dims(lambda d: d.n_ff if d.n_expert else d.n_ff_shared),
    },
    dims=_granite_dims,
    scales_as_llama3=False,
    requires={"hidden_act": "silu", "position_embedding_type": "nope"},
    check=_check_granite,
)

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


def _nemotron_dims(config: Config) -> Dims:
    kinds = _pattern(config)
    d = Dims.of(Config({**config.values, "num_hidden_layers": len(kinds)}, config.name))
    d = _with_state_space(d, config, config.integer("mamba_num_heads"))
    if "moe" in kinds:
        d = replace(
            d,
            n_expert=config.integer("n_routed_experts"),
            n_ff_expert=config.integer("moe_intermediate_size"),
            n_ff_shared=config.integer("moe_shared_expert_intermediate_size"),
        )
    return replace(d, kinds=kinds)


def _nemotron(family: Family, config: Config, d: Dims) -> Metadata:
    epsilon = config.number("layer_norm_epsilon", "norm_eps", default=1e-5)
    n_ff = d.n_ff_expert or d.n_ff
    return {
        **sizes(d, config.integer("max_position_embeddings")),
        Keys.LLM.FEED_FORWARD_LENGTH: [n_ff if k in ("mlp", "moe") else 0 for k in d.kinds],
        Keys.Attention.HEAD_COUNT_KV: [d.n_head_kv if k == "attention" else 0 for k in d.kinds],
        Keys.Attention.KEY_LENGTH: d.head_dim,
        Keys.Attention.VALUE_LENGTH: d.head_dim,
        Keys.Attention.LAYERNORM_EPS: epsilon,
        Keys.Attention.LAYERNORM_RMS_EPS: epsilon,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **experts(config, d, family.n_used),
    }


_NEMOTRON_LAYERS = {"": "attn_norm", "mamba": _MAMBA2, "attention": PLAIN_ATTENTION}

NEMOTRON_H = Family(
    "nemotron_h",
    ("NemotronHForCausalLM",),
    {**_NEMOTRON_LAYERS, "mlp": "ffn_up ffn_down"},
    layer="backbone.layers.{i}",
    sources={
        "ssm_dt.bias": "mixer.dt_bias",
        "ffn_up_exps": "mixer.experts.{e}.up_proj",
        "ffn_down_exps": "mixer.experts.{e}.down_proj",
    },
    makes=_MAKES,
    common=_nemotron,
    metadata=_STATE_SPACE,
    dims=_nemotron_dims,
    roots=("backbone.", "model."),
    applies=lambda config: "moe" not in _pattern(config),
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
        **_NEMOTRON_LAYERS,
        "moe": "ffn_gate_inp exp_probs_b.bias ffn_up_exps ffn_down_exps ffn_up_shexp"
        " ffn_down_shexp",
    },
    metadata={
        **_STATE_SPACE,
        **SHARED_WIDTH,
        Keys.LLM.EXPERT_SHARED_COUNT: integer("n_shared_experts"),
        Keys.LLM.EXPERT_WEIGHTS_NORM: flag("norm_topk_prob", default=True),
        Keys.LLM.EXPERT_WEIGHTS_SCALE: number("routed_scaling_factor", default=1.0),
    },
    applies=lambda config: "moe" in _pattern(config),
    ignored=(r"mtp\..*",),
)

# --- short convolutions --------------------------------------------------------------------------


def _lfm2_dims(config: Config) -> Dims:
    n_ff = config.integer("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", default=True):
        n_ff = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * n_ff / 3))
        multiple = config.integer("block_multiple_of", default=256)
        n_ff = -(-n_ff // multiple) * multiple
    kinds = tuple("conv" if kind == "conv" else "attention" for kind in config.items("layer_types"))
    more = {"cache": config.integer("conv_L_cache")}
    sized = Config({**config.values, "intermediate_size": n_ff}, config.name)
    return replace(Dims.of(sized), kinds=kinds, more=more)


_LFM2_LAYERS = {
    "": "attn_norm ffn_norm",
    "attention": f"{PLAIN_ATTENTION} {HEAD_NORMS}",
    "conv": "shortconv.conv shortconv.in_proj shortconv.out_proj",
}

LFM2 = Family(
    "lfm2",
    ("Lfm2ForCausalLM",),
    {**_LFM2_LAYERS, "": f"{_LFM2_LAYERS['']} {GATED}"},
    model="token_embd token_embd_norm output?",
    norm="none",
    metadata={
        Keys.Attention.HEAD_COUNT_KV: by_kind("attention", lambda d: d.n_head_kv),
        Keys.ShortConv.L_CACHE: of_dims(lambda d: d.more["cache"]),
        Keys.Attention.LAYERNORM_RMS_EPS: number("norm_eps", default=1e-5),
    },
    dims=_lfm2_dims,
    requires={"conv_bias": False},
)


def _lfm2_moe_dims(config: Config) -> Dims:
    d = _lfm2_dims(Config({**config.values, "block_auto_adjust_ff_dim": False}, config.name))
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
    layers={**_LFM2_LAYERS, "dense": GATED, "experts": f"{EXPERTS} exp_probs_b.bias"},
    metadata={
        **LFM2.metadata,
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: of_dims(
            lambda d: sum("dense" in kind.split() for kind in d.kinds)
        ),
        Keys.LLM.EXPERT_GATING_FUNC: 2,  # Sigmoid.
    },
    sources={
        f"ffn_{name}_exps": f"feed_forward.experts.{{e}}.{source}"
        for name, source in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    dims=_lfm2_moe_dims,
    requires={
        "conv_bias": False,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
)
