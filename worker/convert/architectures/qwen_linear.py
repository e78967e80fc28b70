"""Qwen3-Next and Qwen3.5: three layers of linear attention for each layer of gated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.dims import EXPERTS, GATED, HEAD_NORMS, SHARED, Dims
from worker.convert.family.metadata import SHARED_WIDTH, integer, of_dims, sections
from worker.convert.family.rules import Array, Family, From, Make, Sources, decay, squeezed

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


def _tiled_heads(inner: Make = squeezed) -> Make:
    return lambda sources, d: _tiled(inner(sources, d), d, 1)


def _tiled_values(axis: int) -> Make:
    return lambda sources, d: _tiled(sources[0], d, d.more["v_dim"], axis)


def _tiled_behind_keys(sources: Sequence[Array], d: Dims) -> Array:
    """Reorder the rows of v, and keep those of q and k."""
    rows, n = sources[0].reshape(sources[0].shape[0], -1), 2 * d.more["k_heads"] * d.more["k_dim"]
    return np.concatenate([rows[:n], _tiled(rows[n:], d, d.more["v_dim"])])


_COMMON = "attn_norm post_attention_norm"
# The gate of each head follows its q rows.
_ATTENTION = f"attn_q attn_k attn_v attn_output {HEAD_NORMS}"
_LINEAR = "attn_qkv attn_gate ssm_conv1d ssm_dt.bias =ssm_a ssm_norm ssm_out"
_SPARSE = f"{EXPERTS} {SHARED} ffn_gate_inp_shexp"
_DENSE_REQUIRES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "linear_value_head_dim": lambda d: d.more["k_dim"],
}
_SOURCES: Sources = {"ssm_dt.bias": "linear_attn.dt_bias"}

QWEN3_NEXT = Family(
    "qwen3next",
    ("Qwen3NextForCausalLM",),
    {"": f"{_COMMON} {_SPARSE}", "attention": _ATTENTION, "linear": f"{_LINEAR} ssm_ba"},
    sources={
        **_SOURCES,
        "attn_qkv": From("linear_attn.in_proj_qkvz.weight", make=_next_qkv),
        "attn_gate": From("linear_attn.in_proj_qkvz.weight", make=_next_z),
    },
    norm_plus=1.0,
    rotary=0.25,
    metadata={
        Keys.SSM.CONV_KERNEL: of_dims(lambda d: d.more["kernel"]),
        Keys.SSM.STATE_SIZE: of_dims(lambda d: d.more["k_dim"]),
        Keys.SSM.GROUP_COUNT: of_dims(lambda d: d.more["k_heads"]),
        Keys.SSM.TIME_STEP_RANK: of_dims(lambda d: d.more["v_heads"]),
        Keys.SSM.INNER_SIZE: of_dims(lambda d: d.more["v_heads"] * d.more["v_dim"]),
        "{arch}.attention.recurrent_layers": of_dims(lambda d: [k == "linear" for k in d.kinds]),
        Keys.LLM.FULL_ATTENTION_INTERVAL: integer("full_attention_interval", default=_PERIOD),
        **SHARED_WIDTH,
    },
    dims=_expert_dims,
    # The tensors that predict further tokens are left out.
    ignored=(r"mtp\..*",),
    requires={
        **_DENSE_REQUIRES,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)

QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    architecture="qwen35moe",
    names=("Qwen3_5MoeForCausalLM",),
    layers={
        "": f"{_COMMON} {_SPARSE}",
        "attention": _ATTENTION,
        "linear": f"{_LINEAR} ssm_alpha ssm_beta",
    },
    multimodal=("Qwen3_5MoeForConditionalGeneration",),
    sources=_SOURCES,
    makes={
        "ssm_conv1d": _tiled_behind_keys,
        "ssm_dt.bias": _tiled_heads(),
        "ssm_a": _tiled_heads(decay),
        "ssm_out": _tiled_values(1),
        "attn_qkv": _tiled_behind_keys,
        "attn_gate": _tiled_values(0),
        "ssm_alpha": _tiled_heads(),
        "ssm_beta": _tiled_heads(),
    },
    metadata={**QWEN3_NEXT.metadata, Keys.Rope.DIMENSION_SECTIONS: sections(_SECTIONS)},
    roots=("model.", "model.language_model."),
)

QWEN3_5 = replace(
    QWEN3_5_MOE,
    architecture="qwen35",
    names=("Qwen3_5ForCausalLM",),
    layers={**QWEN3_5_MOE.by_kind(), "": f"{_COMMON} {GATED}"},
    multimodal=("Qwen3_5ForConditionalGeneration",),
    dims=_dims,
    requires=_DENSE_REQUIRES,
)
