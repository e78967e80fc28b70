"""GLM-4 of 2025: norms before and after attention and feed-forward, partly rotated heads."""

from __future__ import annotations

from dataclasses import replace

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule
from worker.convert.config import Config


def _glm4(config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata("glm4", config, d),
        **blocks.partial_rotary(config, d, 0.5),
        **blocks.rms_norm(config),
    }


GLM4 = Family(
    architecture="glm4",
    names=("Glm4ForCausalLM",),
    rules={
        **blocks.embeddings(),
        f"{blocks.LAYER}.input_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
        f"{blocks.LAYER}.post_self_attn_layernorm.weight": blocks.norm(
            "blk.{i}.post_attention_norm"
        ),
        f"{blocks.LAYER}.post_attention_layernorm.weight": blocks.norm("blk.{i}.ffn_norm"),
        f"{blocks.LAYER}.post_mlp_layernorm.weight": blocks.norm("blk.{i}.post_ffw_norm"),
        **blocks.attention(),
        f"{blocks.MLP}.gate_up_proj.weight": Rule(
            "blk.{i}.ffn_up.weight", lambda d: (2 * d.n_ff, d.n_embd)
        ),
        f"{blocks.MLP}.down_proj.weight": Rule(
            "blk.{i}.ffn_down.weight", lambda d: (d.n_embd, d.n_ff)
        ),
    },
    metadata=_glm4,
    check=blocks.require_silu,
)


def _glm4_moe(config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata("glm4moe", config, d),
        **blocks.partial_rotary(config, d, 0.5),
        **blocks.rms_norm(config),
        **experts.shared_metadata(config, d, gating=2),
    }


def _check_glm4_moe(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    blocks.require(config, "n_group", 1)


GLM4_MOE = Family(
    architecture="glm4moe",
    names=("Glm4MoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        f"{blocks.LAYER}.input_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
        f"{blocks.LAYER}.post_attention_layernorm.weight": blocks.norm(
            "blk.{i}.post_attention_norm"
        ),
        **blocks.attention(),
        **{
            source: replace(rule, optional=True)
            for source, rule in blocks.head_norms().items()
            if isinstance(rule, Rule)
        },
        **experts.only("dense", blocks.gated_mlp()),
        **experts.only("experts", experts.router(f"{blocks.MLP}.gate.weight")),
        **experts.only(
            "experts", experts.score_correction(f"{blocks.MLP}.gate.e_score_correction_bias")
        ),
        **experts.only(
            "experts", experts.experts(f"{blocks.MLP}.experts", "gate_proj", "up_proj", "down_proj")
        ),
        **experts.only("experts", experts.shared_experts(f"{blocks.MLP}.shared_experts")),
    },
    metadata=_glm4_moe,
    dims=experts.deepseek_dims,
    ignores_extra_layers=True,
    check=_check_glm4_moe,
)

FAMILIES = (GLM4, GLM4_MOE)
