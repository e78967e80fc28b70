"""DeepSeek V2 and V3: attention over a compressed cache, dense first layers, shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Array, Dims, Family, Metadata, Rule, Rules, Shape
from worker.convert.config import Config
from worker.errors import ModelError

_LITE_LAYERS = (26, 27)
"""llama.cpp recognises models with uncompressed queries by these numbers of layers."""


def _dims(config: Config) -> Dims:
    more = {
        "rope": config.integer("qk_rope_head_dim"),
        "nope": config.integer("qk_nope_head_dim"),
        "value": config.integer("v_head_dim"),
        "rank": config.integer("kv_lora_rank"),
        "q_rank": int(config.values.get("q_lora_rank") or 0),
    }
    return replace(experts.deepseek_dims(config), more=more)


def _halves(sources: Sequence[Array], d: Dims) -> Array:
    """The rows of each head: first those that make its keys, then those that make its values."""
    return sources[0].reshape(d.n_head, d.more["nope"] + d.more["value"], d.more["rank"])


def _keys(sources: Sequence[Array], d: Dims) -> Array:
    return np.ascontiguousarray(_halves(sources, d)[:, : d.more["nope"]].swapaxes(1, 2))


def _values(sources: Sequence[Array], d: Dims) -> Array:
    return np.ascontiguousarray(_halves(sources, d)[:, d.more["nope"] :])


def _query_size(d: Dims) -> int:
    return d.n_head * (d.more["nope"] + d.more["rope"])


def _attention() -> Rules:
    query: dict[str, tuple[str, Shape]] = {
        "q_proj": ("attn_q", lambda d: (_query_size(d), d.n_embd)),
        "q_a_proj": ("attn_q_a", lambda d: (d.more["q_rank"], d.n_embd)),
        "q_a_layernorm": ("attn_q_a_norm", lambda d: (d.more["q_rank"],)),
        "q_b_proj": ("attn_q_b", lambda d: (_query_size(d), d.more["q_rank"])),
    }
    cache: dict[str, tuple[str, Shape]] = {
        "kv_a_proj_with_mqa": (
            "attn_kv_a_mqa",
            lambda d: (d.more["rank"] + d.more["rope"], d.n_embd),
        ),
        "kv_a_layernorm": ("attn_kv_a_norm", lambda d: (d.more["rank"],)),
    }
    return {
        **blocks.weights(blocks.ATTENTION, query, optional=True),
        **blocks.weights(blocks.ATTENTION, cache),
        f"{blocks.ATTENTION}.kv_b_proj.weight": (
            Rule(
                "blk.{i}.attn_k_b.weight",
                lambda d: (d.n_head, d.more["rank"], d.more["nope"]),
                make=_keys,
            ),
            Rule(
                "blk.{i}.attn_v_b.weight",
                lambda d: (d.n_head, d.more["value"], d.more["rank"]),
                make=_values,
            ),
        ),
        f"{blocks.ATTENTION}.o_proj.weight": Rule(
            "blk.{i}.attn_output.weight", lambda d: (d.n_embd, d.n_head * d.more["value"])
        ),
    }


def _metadata(_arch: str, config: Config, d: Dims, *, gating: Literal[1, 2]) -> Metadata:
    rank = d.more["rank"]
    found: Metadata = {
        **blocks.sizes(d, config.integer("max_position_embeddings")),
        Keys.Attention.HEAD_COUNT_KV: 1,  # All heads read one compressed cache.
        Keys.Attention.KEY_LENGTH: rank + d.more["rope"],
        Keys.Attention.VALUE_LENGTH: rank,
        Keys.Attention.KEY_LENGTH_MLA: d.more["nope"] + d.more["rope"],
        Keys.Attention.VALUE_LENGTH_MLA: d.more["value"],
        Keys.Attention.KV_LORA_RANK: rank,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **blocks.rms_norm(config),
        **experts.shared_metadata(config, d, gating),
        **_rope(config, d),
    }
    if d.more["q_rank"]:
        found[Keys.Attention.Q_LORA_RANK] = d.more["q_rank"]
    if int(config.values.get("n_group") or 1) > 1:
        found[Keys.LLM.EXPERT_GROUP_COUNT] = config.integer("n_group")
        found[Keys.LLM.EXPERT_GROUP_USED_COUNT] = config.integer("topk_group")
    return found


def _rope(config: Config, d: Dims) -> Metadata:
    rope = config.rope()
    found: Metadata = {
        Keys.Rope.DIMENSION_COUNT: d.more["rope"],
        Keys.Rope.FREQ_BASE: rope.theta,
    }
    if rope.kind == "yarn":
        found |= {
            Keys.Rope.SCALING_TYPE: "yarn",
            Keys.Rope.SCALING_FACTOR: rope.params.number("factor"),
            Keys.Rope.SCALING_ORIG_CTX_LEN: rope.params.integer("original_max_position_embeddings"),
            # llama.cpp divides by 0.1 again.
            Keys.Rope.SCALING_YARN_LOG_MUL: 0.1 * rope.params.number("mscale_all_dim", default=1.0),
        }
    return found


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", attention_bias=False)
    blocks.require(config, moe_layer_freq=1, rope_interleave=True)
    rope = config.rope()
    if rope.kind not in ("default", "yarn"):
        raise ModelError(f"{config.name}: rope scaling {rope.kind!r} is not known for deepseek2")
    if rope.kind == "yarn" and rope.params.values.get("mscale") != rope.params.values.get(
        "mscale_all_dim"
    ):
        raise ModelError(f"{config.name}: mscale and mscale_all_dim must be equal for llama.cpp")
    if (not d.more["q_rank"]) != (d.n_layers in _LITE_LAYERS):
        raise ModelError(
            f"{config.name}: q_lora_rank is {config.values.get('q_lora_rank')}, llama.cpp's "
            f"deepseek2 has none in models of {_LITE_LAYERS} layers and one in all others"
        )


def _check_v2(config: Config, d: Dims) -> None:
    _check(config, d)
    blocks.require(config, topk_method=("greedy", "group_limited_greedy"))


_RULES: Rules = {
    **blocks.embeddings(),
    **blocks.pre_norms(),
    **_attention(),
    **experts.only("dense", blocks.gated_mlp()),
    **experts.only(
        "experts",
        experts.router(f"{blocks.MLP}.gate.weight"),
        experts.experts(f"{blocks.MLP}.experts"),
        experts.shared_experts(f"{blocks.MLP}.shared_experts"),
    ),
}

DEEPSEEK_V2 = Family(
    architecture="deepseek2",
    names=("DeepseekV2ForCausalLM",),
    rules=_RULES,
    metadata=partial(_metadata, gating=1),
    dims=_dims,
    check=_check_v2,
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    names=("DeepseekV3ForCausalLM",),
    rules={
        **_RULES,
        **experts.only(
            "experts", experts.score_correction(f"{blocks.MLP}.gate.e_score_correction_bias")
        ),
    },
    metadata=partial(_metadata, gating=2),
    ignores_extra_layers=True,
    check=_check,
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
