"""Qwen3-Next and Qwen3.5: three layers of linear attention for each layer of gated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures import blocks, experts, qwen
from worker.convert.architectures.rules import Array, Dims, Family, Make, Metadata, Rule, Rules
from worker.convert.architectures.state_space import as_stored, decay
from worker.convert.config import Config

_LINEAR = f"{blocks.LAYER}.linear_attn"
_PERIOD = 4
_SECTIONS = [11, 11, 10, 0]
"""How a head's rotary frequencies are divided among three-dimensional positions; texts use one."""


def _dims(config: Config) -> Dims:
    d = Dims.of(config)
    default = ["full_attention" if (i + 1) % _PERIOD == 0 else "" for i in range(d.n_layers)]
    kinds = config.values.get("layer_types") or default
    more = {
        "k_heads": config.integer("linear_num_key_heads"),
        "v_heads": config.integer("linear_num_value_heads"),
        "k_dim": config.integer("linear_key_head_dim"),
        "v_dim": config.integer("linear_value_head_dim"),
        "kernel": config.integer("linear_conv_kernel_dim", default=4),
    }
    kinds = tuple("attention" if kind == "full_attention" else "linear" for kind in kinds)
    return replace(d, kinds=kinds, more=more)


def _expert_dims(config: Config) -> Dims:
    return replace(
        _dims(config),
        n_expert=config.integer("num_experts"),
        n_ff_expert=config.integer("moe_intermediate_size"),
        n_ff_shared=config.integer("shared_expert_intermediate_size"),
    )


def _keys(d: Dims) -> int:
    return d.more["k_heads"] * d.more["k_dim"]


def _values(d: Dims) -> int:
    return d.more["v_heads"] * d.more["v_dim"]


def _parts(sources: Sequence[Array], d: Dims) -> list[Array]:
    """q, k, v and z of Qwen3-Next, which the source stores together for each key head."""
    per_key = d.more["v_heads"] // d.more["k_heads"] * d.more["v_dim"]
    sizes = [d.more["k_dim"], d.more["k_dim"], per_key, per_key]
    rows = sources[0].reshape(d.more["k_heads"], sum(sizes), -1)
    split = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return [part.reshape(-1, rows.shape[-1]) for part in split]


def _next_qkv(sources: Sequence[Array], d: Dims) -> Array:
    return np.concatenate(_parts(sources, d)[:3])


def _next_z(sources: Sequence[Array], d: Dims) -> Array:
    return np.ascontiguousarray(_parts(sources, d)[3])


def _tiled(values: Array, d: Dims, size: int, axis: int = 0) -> Array:
    """Reorder value heads: the source groups them by key head, the output alternates between
    them."""
    heads = (d.more["k_heads"], d.more["v_heads"] // d.more["k_heads"], size)
    shape = values.shape
    apart = values.reshape(*shape[:axis], *heads, *shape[axis + 1 :])
    return np.ascontiguousarray(apart.swapaxes(axis, axis + 1)).reshape(shape)


def _tiled_heads(inner: Make = as_stored) -> Make:
    return lambda sources, d: _tiled(inner(sources, d), d, 1)


def _tiled_values(axis: int) -> Make:
    return lambda sources, d: _tiled(sources[0], d, d.more["v_dim"], axis)


def _tiled_behind_keys(sources: Sequence[Array], d: Dims) -> Array:
    """Reorder the rows of v, and keep those of q and k."""
    rows = sources[0].reshape(sources[0].shape[0], -1)
    keys = rows[: 2 * _keys(d)]
    return np.concatenate([keys, _tiled(rows[2 * _keys(d) :], d, d.more["v_dim"])])


def _linear(tiled: bool) -> Rules:
    heads: Any = _tiled_heads if tiled else (lambda inner=as_stored: inner)
    return {
        f"{_LINEAR}.conv1d.weight": Rule(
            "blk.{i}.ssm_conv1d.weight",
            lambda d: (2 * _keys(d) + _values(d), d.more["kernel"]),
            make=_tiled_behind_keys if tiled else as_stored,
            keep_f32=True,
        ),
        f"{_LINEAR}.dt_bias": Rule(
            "blk.{i}.ssm_dt.bias", lambda d: (d.more["v_heads"],), make=heads()
        ),
        f"{_LINEAR}.A_log": Rule(
            "blk.{i}.ssm_a", lambda d: (d.more["v_heads"],), make=heads(decay)
        ),
        f"{_LINEAR}.norm.weight": Rule("blk.{i}.ssm_norm.weight", lambda d: (d.more["v_dim"],)),
        f"{_LINEAR}.out_proj.weight": Rule(
            "blk.{i}.ssm_out.weight",
            lambda d: (d.n_embd, _values(d)),
            make=_tiled_values(1) if tiled else None,
        ),
    }


def _qkv(source: str, make: Make) -> Rule:
    return Rule(source, lambda d: (2 * _keys(d) + _values(d), d.n_embd), make=make)


def _z(make: Make) -> Rule:
    return Rule("blk.{i}.attn_gate.weight", lambda d: (_values(d), d.n_embd), make=make)


_NEXT_LINEAR: Rules = {
    **_linear(tiled=False),
    f"{_LINEAR}.in_proj_qkvz.weight": (_qkv("blk.{i}.attn_qkv.weight", _next_qkv), _z(_next_z)),
    f"{_LINEAR}.in_proj_ba.weight": Rule(
        "blk.{i}.ssm_ba.weight", lambda d: (2 * d.more["v_heads"], d.n_embd)
    ),
}
_TILED_LINEAR: Rules = {
    **_linear(tiled=True),
    f"{_LINEAR}.in_proj_qkv.weight": _qkv("blk.{i}.attn_qkv.weight", _tiled_behind_keys),
    f"{_LINEAR}.in_proj_z.weight": _z(_tiled_values(0)),
    **{
        f"{_LINEAR}.in_proj_{x}.weight": Rule(
            f"blk.{{i}}.ssm_{name}.weight",
            lambda d: (d.more["v_heads"], d.n_embd),
            make=_tiled_heads(),
        )
        for x, name in (("a", "alpha"), ("b", "beta"))
    },
}


def _attention() -> Rules:
    """Gated attention: the gate of each head follows its q rows."""
    rules = dict(blocks.attention(biases=False))
    rules[f"{blocks.ATTENTION}.q_proj.weight"] = Rule(
        "blk.{i}.attn_q.weight", lambda d: (2 * d.q_rows, d.n_embd)
    )
    return {**rules, **blocks.head_norms(plus=1.0)}


def _rules(linear: Rules, feed_forward: Rules) -> Rules:
    return {
        **blocks.embeddings(norm_plus=1.0),
        **blocks.norms(
            plus=1.0, input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm"
        ),
        **experts.only("attention", _attention()),
        **experts.only("linear", linear),
        **feed_forward,
    }


def _metadata(arch: str, config: Config, d: Dims) -> Metadata:
    found: Metadata = {
        **blocks.common_metadata(arch, config, d),
        **blocks.partial_rotary(config, d, 0.25),
        **blocks.rms_norm(config),
        Keys.SSM.CONV_KERNEL: d.more["kernel"],
        Keys.SSM.STATE_SIZE: d.more["k_dim"],
        Keys.SSM.GROUP_COUNT: d.more["k_heads"],
        Keys.SSM.TIME_STEP_RANK: d.more["v_heads"],
        Keys.SSM.INNER_SIZE: _values(d),
        "{arch}.attention.recurrent_layers": [kind == "linear" for kind in d.kinds],
        Keys.LLM.FULL_ATTENTION_INTERVAL: config.integer(
            "full_attention_interval", default=_PERIOD
        ),
    }
    if d.n_expert:
        found |= experts.expert_metadata(config, d)
        found[Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH] = d.n_ff_shared
    return found


def _qwen35(arch: str, config: Config, d: Dims) -> Metadata:
    sections = config.rope().params.values.get("mrope_section") or _SECTIONS
    padded = [*sections, 0, 0, 0, 0][:4]
    return {**_metadata(arch, config, d), Keys.Rope.DIMENSION_SECTIONS: padded}


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", attention_bias=False)
    blocks.require(config, linear_value_head_dim=d.more["k_dim"])


def _check_experts(config: Config, d: Dims) -> None:
    _check(config, d)
    blocks.require(config, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


_EXPERTS: Rules = {**qwen.expert_rules(), **qwen.shared_expert()}
_AHEAD = (r"mtp\..*",)
"""The tensors that predict further tokens are left out."""

QWEN3_NEXT = Family(
    architecture="qwen3next",
    names=("Qwen3NextForCausalLM",),
    rules=_rules(_NEXT_LINEAR, _EXPERTS),
    metadata=_metadata,
    dims=_expert_dims,
    ignored=_AHEAD,
    check=_check_experts,
)

QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    architecture="qwen35moe",
    names=("Qwen3_5MoeForCausalLM",),
    rules=_rules(_TILED_LINEAR, _EXPERTS),
    metadata=_qwen35,
    roots=("model.", "model.language_model."),
)

QWEN3_5 = replace(
    QWEN3_5_MOE,
    architecture="qwen35",
    names=("Qwen3_5ForCausalLM",),
    rules=_rules(_TILED_LINEAR, blocks.gated_mlp()),
    dims=_dims,
    check=_check,
)


def _text_part(family: Family, name: str) -> Family:
    """The text part of a multimodal checkpoint, without its vision tensors."""
    return replace(
        family,
        names=(name,),
        section="text_config",
        ignored=(*_AHEAD, r"model\.visual\..*"),
    )


FAMILIES = (
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    _text_part(QWEN3_5, "Qwen3_5ForConditionalGeneration"),
    _text_part(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration"),
)
