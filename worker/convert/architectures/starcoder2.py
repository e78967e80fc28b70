"""StarCoder 2: layer norms and biases throughout, GELU without a gate."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _starcoder2(config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata("starcoder2", config, d),
        **blocks.layer_norm_epsilon(config),
    }


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, "hidden_act", "gelu_pytorch_tanh", "gelu_new")
    blocks.require(config, "use_bias", True)


STARCODER2 = Family(
    architecture="starcoder2",
    names=("Starcoder2ForCausalLM",),
    rules={
        **blocks.embeddings(),
        "model.norm.bias": blocks.norm("output_norm", bias=True),
        **blocks.layer_norm(f"{blocks.LAYER}.input_layernorm", "blk.{i}.attn_norm"),
        **blocks.layer_norm(f"{blocks.LAYER}.post_attention_layernorm", "blk.{i}.ffn_norm"),
        **blocks.attention(),
        **blocks.linear(f"{blocks.MLP}.c_fc", "blk.{i}.ffn_up", lambda d: (d.n_ff, d.n_embd)),
        **blocks.linear(f"{blocks.MLP}.c_proj", "blk.{i}.ffn_down", lambda d: (d.n_embd, d.n_ff)),
    },
    metadata=_starcoder2,
    ignores_window=True,
    check=_check,
)

FAMILIES = (STARCODER2,)
