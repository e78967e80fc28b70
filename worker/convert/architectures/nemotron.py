"""Nemotron: layer norms stored less one, a squared ReLU without a gate, partly rotated heads."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _nemotron(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata(arch, config, d),
        **blocks.partial_rotary(config, d, 0.5),
        **blocks.layer_norm_epsilon(config),
    }


NEMOTRON = Family(
    architecture="nemotron",
    names=("NemotronForCausalLM",),
    rules={
        **blocks.embeddings(norm_plus=1.0),
        "model.norm.bias": blocks.norm("output_norm", bias=True),
        **blocks.layer_norm(f"{blocks.LAYER}.input_layernorm", "blk.{i}.attn_norm", plus=1.0),
        **blocks.layer_norm(
            f"{blocks.LAYER}.post_attention_layernorm", "blk.{i}.ffn_norm", plus=1.0
        ),
        **blocks.attention(),
        **blocks.mlp(),
    },
    metadata=_nemotron,
    head="always",
    check=blocks.requires(hidden_act="relu2"),
)

FAMILIES = (NEMOTRON,)
