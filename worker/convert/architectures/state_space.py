"""Mamba 2, and Falcon-H1, whose layers have a Mamba 2 mixer beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures import blocks, shapes
from worker.convert.architectures.rules import Array, Dims, Family, Make, Metadata, Rule, Rules
from worker.convert.config import Config
from worker.convert.quantize import to_float32

_MIXER = "backbone.layers.{i}.mixer"


def with_sizes(d: Dims, config: Config, n_heads: int) -> Dims:
    """Add the sizes of a state space to `Dims.more`."""
    head_dim = config.integer("mamba_d_head", "mamba_head_dim", "head_dim")
    return replace(
        d,
        more={
            **d.more,
            "heads": n_heads,
            "inner": n_heads * head_dim,
            "state": config.integer("mamba_d_state", "ssm_state_size", "state_size"),
            "groups": config.integer("mamba_n_groups", "n_groups", default=1),
            "kernel": config.integer("mamba_d_conv", "conv_kernel", default=4),
        },
    )


def metadata(d: Dims) -> Metadata:
    return {
        Keys.SSM.CONV_KERNEL: d.more["kernel"],
        Keys.SSM.INNER_SIZE: d.more["inner"],
        Keys.SSM.STATE_SIZE: d.more["state"],
        Keys.SSM.TIME_STEP_RANK: d.more["heads"],
        Keys.SSM.GROUP_COUNT: d.more["groups"],
    }


def decay(sources: Sequence[Array], _d: Dims) -> Array:
    """The decay A: the source stores log(-A)."""
    return -np.exp(to_float32(sources[0]).astype(np.float64)).astype(np.float32)


def as_stored(sources: Sequence[Array], _d: Dims) -> Array:
    """Keeps the values; used where only dimensions of one differ from the source."""
    return sources[0]


def _channels(d: Dims) -> int:
    return d.more["inner"] + 2 * d.more["groups"] * d.more["state"]


def mamba2(prefix: str, *, norm_optional: bool = False) -> Rules:
    """One mixer; published models have no biases of the projections."""

    def heads(d: Dims) -> tuple[int, ...]:
        return (d.more["heads"], 1)

    return {
        f"{prefix}.in_proj.weight": Rule(
            "blk.{i}.ssm_in.weight",
            lambda d: (d.more["inner"] + _channels(d) + d.more["heads"], d.n_embd),
        ),
        f"{prefix}.conv1d.weight": Rule(
            "blk.{i}.ssm_conv1d.weight",
            lambda d: (_channels(d), d.more["kernel"]),
            make=as_stored,
            keep_f32=True,
        ),
        f"{prefix}.conv1d.bias": Rule("blk.{i}.ssm_conv1d.bias", lambda d: (_channels(d),)),
        f"{prefix}.dt_bias": Rule("blk.{i}.ssm_dt.bias", lambda d: (d.more["heads"],)),
        f"{prefix}.A_log": Rule("blk.{i}.ssm_a", heads, make=decay, keep_f32=True),
        f"{prefix}.D": Rule("blk.{i}.ssm_d", heads, make=as_stored, keep_f32=True),
        f"{prefix}.out_proj.weight": Rule(
            "blk.{i}.ssm_out.weight", lambda d: (d.n_embd, d.more["inner"])
        ),
        f"{prefix}.norm.weight": Rule(
            "blk.{i}.ssm_norm.weight",
            lambda d: (d.more["groups"], d.more["inner"] // d.more["groups"]),
            make=as_stored,
            optional=norm_optional,
            keep_f32=True,
        ),
    }


# --- Mamba 2 alone --------------------------------------------------------------------------


def _mamba2_dims(config: Config) -> Dims:
    n_heads = config.integer("num_heads")
    d = Dims(
        n_layers=config.integer("num_hidden_layers"),
        n_embd=config.integer("hidden_size"),
        n_vocab=config.integer("vocab_size"),
        n_ff=0,
        n_head=0,
        n_head_kv=0,
        head_dim=0,
    )
    return with_sizes(d, config, n_heads)


def _mamba2(_arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.sizes(d, n_positions=1 << 20),  # Mamba 2 has no limit.
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        Keys.Attention.LAYERNORM_RMS_EPS: config.number("layer_norm_epsilon"),
        **metadata(d),
    }


MAMBA2 = Family(
    architecture="mamba2",
    names=("Mamba2ForCausalLM",),
    rules={
        **blocks.embeddings("backbone.embeddings", "backbone.norm_f"),
        "backbone.layers.{i}.norm.weight": blocks.norm("blk.{i}.attn_norm"),
        **mamba2(_MIXER),
    },
    metadata=_mamba2,
    dims=_mamba2_dims,
    roots=("backbone.", "model.backbone."),
    check=blocks.requires(hidden_act="silu", use_bias=False, use_conv_bias=True),
)


# --- Falcon-H1: its multipliers are applied here, as llama.cpp has none ----------------------


def _falcon_dims(config: Config) -> Dims:
    d = with_sizes(Dims.of(config), config, config.integer("mamba_n_heads"))
    return replace(d, scales=_falcon_scales(config))


def _falcon_scales(config: Config) -> dict[str, tuple[float, ...]]:
    attention = config.number("attention_in_multiplier", default=1.0)
    mlp = config.values.get("mlp_multipliers") or [1.0, 1.0]
    return {
        "embedding": (config.number("embedding_multiplier", default=1.0),),
        "head": (config.number("lm_head_multiplier", default=1.0),),
        "attention": (attention,),
        "key": (attention * config.number("key_multiplier", default=1.0),),
        "attention_out": (config.number("attention_out_multiplier", default=1.0),),
        "gate": (float(mlp[0]),),
        "down": (float(mlp[1]),),
        "ssm_out": (config.number("ssm_out_multiplier", default=1.0),),
        "ssm_in": tuple(
            config.number("ssm_in_multiplier", default=1.0) * float(x)
            for x in config.values.get("ssm_multipliers") or [1.0] * 5
        ),
    }


def _times(name: str, inner: Make = as_stored) -> Make:
    """Multiply by one of the family's constants; a factor of 1 keeps the stored values."""

    def make(sources: Sequence[Array], d: Dims) -> Array:
        values, (factor,) = inner(sources, d), d.scales[name]
        return values if factor == 1.0 else to_float32(values) * np.float32(factor)

    return make


def _scaled_input(sources: Sequence[Array], d: Dims) -> Array:
    """The input projection, whose rows for z, x, B, C and dt each have their own multiplier."""
    inner, side = d.more["inner"], d.more["groups"] * d.more["state"]
    sizes = (inner, inner, side, side, d.more["heads"])
    factors = np.repeat(np.asarray(d.scales["ssm_in"], dtype=np.float32), sizes)
    return sources[0] if (factors == 1).all() else to_float32(sources[0]) * factors[:, None]


def _falcon_rules() -> Rules:
    def scaled(rules: Rules, scales: dict[str, str]) -> Rules:
        def with_scale(source: str, rule: Rule) -> Rule:
            name = next((n for end, n in scales.items() if source.endswith(end)), None)
            return replace(rule, make=_times(name)) if name else rule

        return {s: with_scale(s, r) for s, r in rules.items() if not isinstance(r, tuple)}

    layer = blocks.LAYER
    feed_forward = blocks.gated_mlp(f"{layer}.feed_forward")
    mixer = dict(mamba2(f"{layer}.mamba", norm_optional=True))
    source = f"{layer}.mamba.in_proj.weight"
    in_proj = mixer[source]
    assert isinstance(in_proj, Rule)
    mixer[source] = replace(in_proj, make=_scaled_input)
    return {
        **scaled(
            blocks.embeddings(last_norm="model.final_layernorm"),
            {"embed_tokens.weight": "embedding", "lm_head.weight": "head"},
        ),
        **blocks.norms(input_layernorm="attn_norm"),
        f"{layer}.pre_ff_layernorm.weight": Rule("blk.{i}.ffn_norm", shapes.vector),
        **scaled(
            blocks.attention(biases=False),
            {
                "q_proj.weight": "attention",
                "k_proj.weight": "key",
                "v_proj.weight": "attention",
                "o_proj.weight": "attention_out",
            },
        ),
        **scaled(feed_forward, {"gate_proj.weight": "gate", "down_proj.weight": "down"}),
        **scaled(mixer, {"out_proj.weight": "ssm_out"}),
    }


def _falcon(arch: str, config: Config, d: Dims) -> Metadata:
    return blocks.rms_metadata(arch, config, d) | metadata(d)


FALCON_H1 = Family(
    architecture="falcon-h1",
    names=("FalconH1ForCausalLM",),
    rules=_falcon_rules(),
    metadata=_falcon,
    dims=_falcon_dims,
    check=blocks.requires(
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        mamba_proj_bias=False,
        projectors_bias=False,
    ),
)

FAMILIES = (MAMBA2, FALCON_H1)
