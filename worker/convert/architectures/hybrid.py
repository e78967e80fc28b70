"""Decoders whose layers are of several kinds: attention, Mamba 2 mixers, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures.dense import GRANITE
from worker.convert.architectures.experts import GRANITE_MOE
from worker.convert.config import Config
from worker.convert.family.dims import Dims, with_experts
from worker.convert.family.metadata import SHARED_WIDTH, flag, integer, kv_heads, number, of_dims
from worker.convert.family.rules import Array, Family, Make, Setting, Sources, decay, halves
from worker.errors import ModelError

# --- state spaces ------------------------------------------------------------------------------

_HEADS = ("mamba_n_heads", "mamba_num_heads")
_STATE_SPACE: Mapping[str, Setting] = {
    Keys.SSM.CONV_KERNEL: integer("mamba_d_conv", "conv_kernel", default=4),
    Keys.SSM.INNER_SIZE: of_dims(lambda d: d.extra["inner"]),
    Keys.SSM.STATE_SIZE: integer("mamba_d_state", "ssm_state_size", "state_size"),
    Keys.SSM.TIME_STEP_RANK: integer(*_HEADS),
    Keys.SSM.GROUP_COUNT: of_dims(lambda d: d.extra["groups"]),
}


def _column(sources: Sequence[Array], _d: Dims) -> Array:
    return sources[0].reshape(-1, 1)


_MAKES: Mapping[str, Make] = {
    "ssm_a": lambda sources, d: decay([_column(sources, d)], d),
    "ssm_d": _column,
    "ssm_norm": lambda sources, d: sources[0].reshape(d.extra["groups"], -1),
}


def _with_state_space(d: Dims, config: Config) -> Dims:
    width = config.integer("mamba_d_head", "mamba_head_dim", "head_dim")
    sizes = {
        "inner": config.integer(*_HEADS) * width,
        "groups": config.integer("mamba_n_groups", "n_groups", default=1),
    }
    return replace(d, extra=sizes)


def _granite_kinds(config: Config) -> tuple[str, ...]:
    given = map(str, config.items("layer_types"))
    return tuple("attention" if "att" in k and "linear" not in k else "mamba" for k in given)


def _granite_dims(config: Config) -> Dims:
    d = replace(GRANITE_MOE.dims(config), kinds=_granite_kinds(config))
    return _with_state_space(d, config)


def _check_granite(config: Config, d: Dims) -> None:
    if d.extra["inner"] != 2 * d.n_embd:
        raise ModelError(f"{config.name}: llama.cpp's granitehybrid implements mamba_expand 2 only")


_GRANITE_4: Mapping[str, Setting] = {
    # llama.cpp rotates only if this is set.
    Keys.Rope.SCALING_FINETUNED: lambda config, d: (
        config.values.get("position_embedding_type") == "rope"
    ),
}
_POSITIONS = ("nope", "rope")

GRANITE_HYBRID = replace(
    GRANITE_MOE,
    architecture="granitehybrid",
    names=("GraniteMoeHybridForCausalLM",),
    makes=_MAKES,
    metadata={
        **GRANITE_MOE.metadata,
        **_STATE_SPACE,
        **_GRANITE_4,
        Keys.Attention.HEAD_COUNT_KV: kv_heads,
    },
    dims=_granite_dims,
    applies=lambda config: bool(config.values.get("num_local_experts")),
    scales_as_llama3=False,
    requires={"hidden_act": "silu", "position_embedding_type": _POSITIONS},
    check=_check_granite,
)

# Without experts, the shared MLP is the whole feed-forward block.
_SHARED_ALONE: Sources = {
    "shared_mlp.input_linear.weight": halves(),
    "shared_mlp.output_linear.weight": "ffn_down",
}

GRANITE_HYBRID_DENSE = replace(
    GRANITE_HYBRID,
    sources=_SHARED_ALONE,
    metadata={
        **GRANITE_HYBRID.metadata,
        Keys.LLM.FEED_FORWARD_LENGTH: of_dims(lambda d: d.n_ff_shared),
    },
    applies=lambda config: "mamba" in _granite_kinds(config),
)

GRANITE_4 = replace(
    GRANITE,
    names=GRANITE_HYBRID.names,
    sources=_SHARED_ALONE,
    metadata={
        **GRANITE.metadata,
        **_GRANITE_4,
        Keys.LLM.FEED_FORWARD_LENGTH: integer("shared_intermediate_size"),
    },
    requires=GRANITE_HYBRID.requires,
)

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {**_LETTERS, "linear_attention": "mamba", "full_attention": "attention"}


def _pattern(config: Config) -> tuple[str, ...]:
    """The kind of each layer: older configurations have letters, newer ones words."""
    letters, key = config.values.get("hybrid_override_pattern"), "layers_block_type"
    given = list(letters) if isinstance(letters, str) else config.items(key)
    kinds = [_KINDS.get(str(kind), str(kind)) for kind in given]
    if not kinds or not set(kinds) <= set(_LETTERS.values()):
        known = f"{config.spelling(key)} must list layers of the kinds {', '.join(_KINDS)}"
        raise ModelError(f"{config.name}: {known}, not {given!r:.80}")
    return tuple(kinds)


def _nemotron_config(config: Config) -> Config:
    config = config.renamed({"head_dim": "attention_head_dim"})
    return config.changed(num_hidden_layers=len(_pattern(config)))


def _nemotron_dims(config: Config) -> Dims:
    d = replace(Dims.of(config), kinds=_pattern(config))
    return _with_state_space(d, config)


_EPSILON = number("layer_norm_epsilon", "norm_eps", default=1e-5)
_NEMOTRON: Mapping[str, Setting] = {
    **_STATE_SPACE,
    Keys.LLM.FEED_FORWARD_LENGTH: of_dims(
        lambda d: [(d.n_ff_expert or d.n_ff) if k in ("mlp", "moe") else 0 for k in d.kinds]
    ),
    Keys.Attention.HEAD_COUNT_KV: kv_heads,
    Keys.Attention.LAYERNORM_EPS: _EPSILON,
    Keys.Attention.LAYERNORM_RMS_EPS: _EPSILON,
    Keys.Rope.DIMENSION_COUNT: None,  # Only the state carries positions.
    Keys.Rope.FREQ_BASE: None,
}

NEMOTRON_H = Family(
    "nemotron_h",
    ("NemotronHForCausalLM",),
    sources={f"mixer.experts.{x}_proj.weight": f"ffn_{x}_exps" for x in ("up", "down")},
    makes=_MAKES,
    norm="none",
    metadata=_NEMOTRON,
    config=_nemotron_config,
    dims=_nemotron_dims,
    applies=lambda config: "moe" not in _pattern(config),
    requires={
        "mlp_hidden_act": "relu2",
        **dict.fromkeys(("use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias"), False),
        "use_conv_bias": True,
        "n_group": 1,
        "moe_latent_size": None,
    },
)

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    architecture="nemotron_h_moe",
    dims=with_experts(
        "n_routed_experts", shared_width="moe_shared_expert_intermediate_size", of=_nemotron_dims
    ),
    metadata={
        **_NEMOTRON,
        **SHARED_WIDTH,
        Keys.LLM.EXPERT_SHARED_COUNT: integer("n_shared_experts"),
        Keys.LLM.EXPERT_WEIGHTS_NORM: flag("norm_topk_prob", default=True),
        Keys.LLM.EXPERT_WEIGHTS_SCALE: number("routed_scaling_factor", default=1.0),
    },
    applies=lambda config: "moe" in _pattern(config),
)

# --- short convolutions --------------------------------------------------------------------------


def _tied(config: Config) -> Config:
    """Published configurations have a key of their own, which overrides the usual one."""
    return config.renamed({"tie_word_embeddings": "tie_embedding"})


def _lfm2_config(config: Config) -> Config:
    config = _tied(config)
    n_ff = config.integer("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", default=True):
        n_ff = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * n_ff / 3))
        multiple = config.integer("block_multiple_of", default=256)
        n_ff = -(-n_ff // multiple) * multiple
    return config.changed(intermediate_size=n_ff)


def _lfm2_dims(config: Config) -> Dims:
    """Older configurations list the layers with attention (all by default), newer ones the kind of
    each layer."""
    d = Dims.of(config)
    layers = range(d.n_layers)
    attending = config.items("full_attn_idxs", [*layers])
    default = ["" if i in attending else "conv" for i in layers]
    given = config.items("layer_types", default)
    return replace(d, kinds=tuple("conv" if kind == "conv" else "attention" for kind in given))


LFM2 = Family(
    "lfm2",
    ("Lfm2ForCausalLM", "LFM2ForCausalLM"),
    norm="none",
    metadata={
        Keys.Attention.HEAD_COUNT_KV: kv_heads,
        Keys.ShortConv.L_CACHE: integer("conv_L_cache"),
        Keys.Attention.LAYERNORM_RMS_EPS: number("norm_eps", default=1e-5),
    },
    config=_lfm2_config,
    dims=_lfm2_dims,
    requires={"conv_bias": False},
)

LFM2_MOE = replace(
    LFM2,
    architecture="lfm2moe",
    names=("Lfm2MoeForCausalLM",),
    metadata={
        **LFM2.metadata,
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: of_dims(
            lambda d: sum("dense" in kind.split() for kind in d.kinds)
        ),
        Keys.LLM.EXPERT_GATING_FUNC: 2,  # Sigmoid.
    },
    config=_tied,
    dims=with_experts("num_experts", n_dense="num_dense_layers", of=_lfm2_dims),
    requires={
        "conv_bias": False,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
)
