"""Nemotron: layer norms stored less one, a squared ReLU without a gate, partly rotated heads."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules
from worker.convert.config import Config


def _nemotron(config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata("nemotron", config, d),
        **blocks.partial_rotary(config, d, 0.5),
        **blocks.layer_norm_epsilon(config),
    }


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, "hidden_act", "relu2")


def _norms() -> Rules:
    return {
        "model.norm.bias": blocks.norm("output_norm", bias=True),
        **blocks.layer_norm(f"{blocks.LAYER}.input_layernorm", "blk.{i}.attn_norm", plus=1.0),
        **blocks.layer_norm(
            f"{blocks.LAYER}.post_attention_layernorm", "blk.{i}.ffn_norm", plus=1.0
        ),
    }


NEMOTRON = Family(
    architecture="nemotron",
    names=("NemotronForCausalLM",),
    rules={
        **blocks.embeddings(norm_plus=1.0),
        **_norms(),
        **blocks.attention(),
        f"{blocks.MLP}.up_proj.weight": Rule("blk.{i}.ffn_up.weight", lambda d: (d.n_ff, d.n_embd)),
        f"{blocks.MLP}.down_proj.weight": Rule(
            "blk.{i}.ffn_down.weight", lambda d: (d.n_embd, d.n_ff)
        ),
    },
    metadata=_nemotron,
    head="always",
    check=_check,
)

FAMILIES = (NEMOTRON,)
