"""StableLM: layer norms with biases, partly rotated heads."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules
from worker.convert.config import Config


def _stablelm(config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata("stablelm", config, d),
        **blocks.partial_rotary(config, d, 0.25),
        Keys.LLM.USE_PARALLEL_RESIDUAL: config.flag("use_parallel_residual"),
        **blocks.layer_norm_epsilon(config),
    }


def _per_head_norms() -> Rules:
    """StableLM 2 12B has a separate norm for each head."""
    return {
        f"{blocks.ATTENTION}.q_layernorm.norms.{{e}}.weight": Rule(
            "blk.{i}.attn_q_norm.weight",
            lambda d: (d.n_head, d.head_dim),
            optional=True,
            stack=lambda d: d.n_head,
            keep_f32=True,
        ),
        f"{blocks.ATTENTION}.k_layernorm.norms.{{e}}.weight": Rule(
            "blk.{i}.attn_k_norm.weight",
            lambda d: (d.n_head_kv, d.head_dim),
            optional=True,
            stack=lambda d: d.n_head_kv,
            keep_f32=True,
        ),
    }


STABLELM = Family(
    architecture="stablelm",
    names=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    rules={
        **blocks.embeddings(),
        "model.norm.bias": blocks.norm("output_norm", bias=True),
        f"{blocks.LAYER}.input_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
        f"{blocks.LAYER}.input_layernorm.bias": blocks.norm("blk.{i}.attn_norm", bias=True),
        # Absent if attention and feed-forward run in parallel behind one norm.
        f"{blocks.LAYER}.post_attention_layernorm.weight": Rule(
            "blk.{i}.ffn_norm.weight", blocks.vector, optional=True
        ),
        f"{blocks.LAYER}.post_attention_layernorm.bias": Rule(
            "blk.{i}.ffn_norm.bias", blocks.vector, optional=True
        ),
        **blocks.attention(),
        **_per_head_norms(),
        **blocks.gated_mlp(),
    },
    metadata=_stablelm,
    head="always",
    ignored=(r".*\.rotary_emb\.inv_freq",),
    check=blocks.require_silu,
)

FAMILIES = (STABLELM,)
