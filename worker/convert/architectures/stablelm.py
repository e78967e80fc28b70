"""StableLM: layer norms with biases, partly rotated heads."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _stablelm(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata(arch, config, d),
        **blocks.partial_rotary(config, d, 0.25),
        Keys.LLM.USE_PARALLEL_RESIDUAL: config.flag("use_parallel_residual"),
        **blocks.layer_norm_epsilon(config),
    }


STABLELM = Family(
    architecture="stablelm",
    names=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    rules={
        **blocks.embeddings(),
        "model.norm.bias": blocks.norm("output_norm", bias=True),
        **blocks.layer_norm(f"{blocks.LAYER}.input_layernorm", "blk.{i}.attn_norm"),
        # Absent if attention and feed-forward run in parallel behind one norm.
        **blocks.layer_norm(
            f"{blocks.LAYER}.post_attention_layernorm", "blk.{i}.ffn_norm", optional=True
        ),
        **blocks.attention(),
        # StableLM 2 12B has a separate norm for each head.
        **blocks.norm_per_head("q_layernorm.norms.{e}", "k_layernorm.norms.{e}"),
        **blocks.gated_mlp(),
    },
    metadata=_stablelm,
    head="always",
    ignored=(r".*\.rotary_emb\.inv_freq",),
    check=blocks.requires(hidden_act="silu"),
)

FAMILIES = (STABLELM,)
