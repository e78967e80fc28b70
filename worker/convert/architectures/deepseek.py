"""DeepSeek V2 and V3: attention over a compressed cache, dense first layers, shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Array, Dims, Family, Metadata, Rule, Rules
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
    attention = blocks.ATTENTION
    return {
        f"{attention}.q_proj.weight": Rule(
            "blk.{i}.attn_q.weight", lambda d: (_query_size(d), d.n_embd), optional=True
        ),
        f"{attention}.q_a_proj.weight": Rule(
            "blk.{i}.attn_q_a.weight", lambda d: (d.more["q_rank"], d.n_embd), optional=True
        ),
        f"{attention}.q_a_layernorm.weight": Rule(
            "blk.{i}.attn_q_a_norm.weight", lambda d: (d.more["q_rank"],), optional=True
        ),
        f"{attention}.q_b_proj.weight": Rule(
            "blk.{i}.attn_q_b.weight", lambda d: (_query_size(d), d.more["q_rank"]), optional=True
        ),
        f"{attention}.kv_a_proj_with_mqa.weight": Rule(
            "blk.{i}.attn_kv_a_mqa.weight", lambda d: (d.more["rank"] + d.more["rope"], d.n_embd)
        ),
        f"{attention}.kv_a_layernorm.weight": Rule(
            "blk.{i}.attn_kv_a_norm.weight", lambda d: (d.more["rank"],)
        ),
        f"{attention}.kv_b_proj.weight": (
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
        f"{attention}.o_proj.weight": Rule(
            "blk.{i}.attn_output.weight", lambda d: (d.n_embd, d.n_head * d.more["value"])
        ),
    }


def _metadata(config: Config, d: Dims, gating: Literal[1, 2]) -> Metadata:
    arch, rank = "deepseek2", d.more["rank"]
    found: Metadata = {
        f"{arch}.block_count": d.n_layers,
        f"{arch}.context_length": config.integer("max_position_embeddings"),
        f"{arch}.embedding_length": d.n_embd,
        f"{arch}.feed_forward_length": d.n_ff,
        f"{arch}.attention.head_count": d.n_head,
        f"{arch}.attention.head_count_kv": 1,  # All heads read one compressed cache.
        f"{arch}.attention.key_length": rank + d.more["rope"],
        f"{arch}.attention.value_length": rank,
        f"{arch}.attention.key_length_mla": d.more["nope"] + d.more["rope"],
        f"{arch}.attention.value_length_mla": d.more["value"],
        f"{arch}.attention.kv_lora_rank": rank,
        f"{arch}.vocab_size": d.n_vocab,
        **blocks.rms_norm(arch, config),
        **experts.shared_metadata(arch, config, d, gating),
        **_rope(arch, config, d),
    }
    if d.more["q_rank"]:
        found[f"{arch}.attention.q_lora_rank"] = d.more["q_rank"]
    if int(config.values.get("n_group") or 1) > 1:
        found[f"{arch}.expert_group_count"] = config.integer("n_group")
        found[f"{arch}.expert_group_used_count"] = config.integer("topk_group")
    return found


def _rope(arch: str, config: Config, d: Dims) -> Metadata:
    rope = config.rope()
    found: Metadata = {
        f"{arch}.rope.dimension_count": d.more["rope"],
        f"{arch}.rope.freq_base": rope.theta,
    }
    if rope.kind == "yarn":
        found |= {
            f"{arch}.rope.scaling.type": "yarn",
            f"{arch}.rope.scaling.factor": rope.params.number("factor"),
            f"{arch}.rope.scaling.original_context_length": rope.params.integer(
                "original_max_position_embeddings"
            ),
            # llama.cpp divides by 0.1 again.
            f"{arch}.rope.scaling.yarn_log_multiplier": 0.1
            * rope.params.number("mscale_all_dim", default=1.0),
        }
    return found


def _check(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    blocks.require(config, "attention_bias", False)
    blocks.require(config, "moe_layer_freq", 1)
    blocks.require(config, "rope_interleave", True)
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
    blocks.require(config, "topk_method", "greedy", "group_limited_greedy")


_RULES: Rules = {
    **blocks.embeddings(),
    **blocks.pre_norms(),
    **_attention(),
    **experts.only("dense", blocks.gated_mlp()),
    **experts.only("experts", experts.router(f"{blocks.MLP}.gate.weight")),
    **experts.only(
        "experts", experts.experts(f"{blocks.MLP}.experts", "gate_proj", "up_proj", "down_proj")
    ),
    **experts.only("experts", experts.shared_experts(f"{blocks.MLP}.shared_experts")),
}

DEEPSEEK_V2 = Family(
    architecture="deepseek2",
    names=("DeepseekV2ForCausalLM",),
    rules=_RULES,
    metadata=lambda config, d: _metadata(config, d, 1),
    dims=_dims,
    check=_check_v2,
)

DEEPSEEK_V3 = Family(
    architecture="deepseek2",
    names=("DeepseekV3ForCausalLM",),
    rules={
        **_RULES,
        **experts.only(
            "experts", experts.score_correction(f"{blocks.MLP}.gate.e_score_correction_bias")
        ),
    },
    metadata=lambda config, d: _metadata(config, d, 2),
    dims=_dims,
    ignores_extra_layers=True,
    check=_check,
)

FAMILIES = (DEEPSEEK_V2, DEEPSEEK_V3)
