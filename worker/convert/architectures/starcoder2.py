"""StarCoder 2: layer norms and biases throughout, GELU without a gate."""

from __future__ import annotations

from worker.convert.architectures import blocks, shapes
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _starcoder2(arch: str, config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata(arch, config, d) | blocks.layer_norm_epsilon(config)


STARCODER2 = Family(
    architecture="starcoder2",
    names=("Starcoder2ForCausalLM",),
    rules={
        **blocks.embeddings(),
        "model.norm.bias": blocks.norm("output_norm", bias=True),
        **blocks.layer_norm(f"{blocks.LAYER}.input_layernorm", "blk.{i}.attn_norm"),
        **blocks.layer_norm(f"{blocks.LAYER}.post_attention_layernorm", "blk.{i}.ffn_norm"),
        **blocks.attention(),
        **blocks.linear(f"{blocks.MLP}.c_fc", "blk.{i}.ffn_up", shapes.up),
        **blocks.linear(f"{blocks.MLP}.c_proj", "blk.{i}.ffn_down", shapes.down),
    },
    metadata=_starcoder2,
    ignores_window=True,
    check=blocks.requires(hidden_act=("gelu_pytorch_tanh", "gelu_new"), use_bias=True),
)

FAMILIES = (STARCODER2,)
