"""GLM-4 of 2025: norms before and after attention and feed-forward, partly rotated heads."""

from __future__ import annotations

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _glm4(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata(arch, config, d),
        **blocks.partial_rotary(config, d, 0.5),
        **blocks.rms_norm(config),
    }


GLM4 = Family(
    architecture="glm4",
    names=("Glm4ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.norms(
            input_layernorm="attn_norm",
            post_self_attn_layernorm="post_attention_norm",
            post_attention_layernorm="ffn_norm",
            post_mlp_layernorm="post_ffw_norm",
        ),
        **blocks.attention(),
        **blocks.fused_mlp(),
    },
    metadata=_glm4,
    check=blocks.requires(hidden_act="silu"),
)


def _glm4_moe(arch: str, config: Config, d: Dims) -> Metadata:
    return _glm4(arch, config, d) | experts.shared_metadata(config, d, gating=2)


GLM4_MOE = Family(
    architecture="glm4moe",
    names=("Glm4MoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.norms(input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm"),
        **blocks.attention(),
        **blocks.head_norms(optional=True),
        **experts.only("dense", blocks.gated_mlp()),
        **experts.only(
            "experts",
            experts.router(f"{blocks.MLP}.gate.weight"),
            experts.score_correction(f"{blocks.MLP}.gate.e_score_correction_bias"),
            experts.experts(f"{blocks.MLP}.experts"),
            experts.shared_experts(f"{blocks.MLP}.shared_experts"),
        ),
    },
    metadata=_glm4_moe,
    dims=experts.deepseek_dims,
    ignores_extra_layers=True,
    check=blocks.requires(hidden_act="silu", n_group=1),
)

FAMILIES = (GLM4, GLM4_MOE)
