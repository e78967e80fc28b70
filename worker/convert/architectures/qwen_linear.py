"""Qwen3-Next and Qwen3.5: three layers of linear attention for each layer of gated attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.dims import Dims, with_experts
from worker.convert.family.metadata import SHARED_WIDTH, integer, of_dims, sections
from worker.convert.family.rules import Array, Family, Into, Make, decay, squeezed

_PERIOD = 4
_SECTIONS = [11, 11, 10, 0]
"""How a head's rotary frequencies are divided among the dimensions of a position."""


def _dims(config: Config) -> Dims:
    d = Dims.of(config)
    period = config.integer("full_attention_interval", default=_PERIOD)
    default = ["full_attention" if (i + 1) % period == 0 else "" for i in range(d.n_layers)]
    given = config.items("layer_types", default)
    extra = {
        "k_heads": config.integer("linear_num_key_heads"),
        "v_heads": config.integer("linear_num_value_heads"),
        "k_dim": config.integer("linear_key_head_dim"),
        "v_dim": config.integer("linear_value_head_dim"),
    }
    kinds = tuple("attention" if kind == "full_attention" else "linear" for kind in given)
    return replace(d, kinds=kinds, extra=extra)


def _from_qkvz(*wanted: int) -> Make:
    """The `wanted` of q, k, v and z (0 to 3), which Qwen3-Next stores together by key head."""

    def make(sources: Sequence[Array], d: Dims) -> Array:
        per_key = d.extra["v_heads"] // d.extra["k_heads"] * d.extra["v_dim"]
        sizes = [d.extra["k_dim"], d.extra["k_dim"], per_key, per_key]
        rows = sources[0].reshape(d.extra["k_heads"], sum(sizes), -1)
        parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
        return np.concatenate([parts[i].reshape(-1, rows.shape[-1]) for i in wanted])

    return make


def _tiled(values: Array, d: Dims, size: int, axis: int = 0) -> Array:
    """Reorder value heads: the source groups them by key head, the output takes one per group in
    turn."""
    heads = (d.extra["k_heads"], d.extra["v_heads"] // d.extra["k_heads"], size)
    shape = values.shape
    apart = values.reshape(*shape[:axis], *heads, *shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(shape)


def _tiled_heads(inner: Make = squeezed) -> Make:
    return lambda sources, d: _tiled(inner(sources, d), d, 1)


def _tiled_values(axis: int) -> Make:
    return lambda sources, d: _tiled(sources[0], d, d.extra["v_dim"], axis)


def _tiled_after_keys(sources: Sequence[Array], d: Dims) -> Array:
    """Reorder the rows of v, and keep those of q and k."""
    rows, n = sources[0].reshape(sources[0].shape[0], -1), 2 * d.extra["k_heads"] * d.extra["k_dim"]
    return np.concatenate([rows[:n], _tiled(rows[n:], d, d.extra["v_dim"])])


_DENSE_REQUIRES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "linear_value_head_dim": lambda d: d.extra["k_dim"],
}

QWEN3_NEXT = Family(
    "qwen3next",
    ("Qwen3NextForCausalLM",),
    sources={
        "linear_attn.in_proj_qkvz.weight": (
            Into("attn_qkv", make=_from_qkvz(0, 1, 2)),
            Into("attn_gate", make=_from_qkvz(3)),
        )
    },
    norm_plus=1.0,
    rotary=0.25,
    metadata={
        Keys.SSM.CONV_KERNEL: integer("linear_conv_kernel_dim", default=4),
        Keys.SSM.STATE_SIZE: of_dims(lambda d: d.extra["k_dim"]),
        Keys.SSM.GROUP_COUNT: of_dims(lambda d: d.extra["k_heads"]),
        Keys.SSM.TIME_STEP_RANK: of_dims(lambda d: d.extra["v_heads"]),
        Keys.SSM.INNER_SIZE: of_dims(lambda d: d.extra["v_heads"] * d.extra["v_dim"]),
        "{arch}.attention.recurrent_layers": of_dims(lambda d: [k == "linear" for k in d.kinds]),
        Keys.LLM.FULL_ATTENTION_INTERVAL: integer("full_attention_interval", default=_PERIOD),
        **SHARED_WIDTH,
    },
    dims=with_experts("num_experts", shared_width="shared_expert_intermediate_size", of=_dims),
    needs="attn_qkv attn_gate",
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
    multimodal=("Qwen3_5MoeForConditionalGeneration",),
    sources={},
    makes={
        "ssm_conv1d": _tiled_after_keys,
        "ssm_dt.bias": _tiled_heads(),
        "ssm_a": _tiled_heads(decay),
        "ssm_out": _tiled_values(1),
        "attn_qkv": _tiled_after_keys,
        "attn_gate": _tiled_values(0),
        "ssm_alpha": _tiled_heads(),
        "ssm_beta": _tiled_heads(),
    },
    metadata={
        **QWEN3_NEXT.metadata,
        Keys.Rope.DIMENSION_SECTIONS: sections(_SECTIONS),
        Keys.LLM.FEED_FORWARD_LENGTH: None,  # Some readers recognise their own files by this key.
    },
)

QWEN3_5 = replace(
    QWEN3_5_MOE,
    architecture="qwen35",
    names=("Qwen3_5ForCausalLM",),
    multimodal=("Qwen3_5ForConditionalGeneration",),
    metadata={**QWEN3_5_MOE.metadata, Keys.LLM.FEED_FORWARD_LENGTH: integer("intermediate_size")},
    dims=_dims,
    requires=_DENSE_REQUIRES,
)
