"""Cohere's Command-R and Command-R7B: attention and feed-forward in parallel, behind one norm."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules
from worker.convert.config import Config

_LAYERS_WITH_HEAD_NORMS = 64
"""llama.cpp reads norms of heads only in models with at least this many layers."""
_COMMON: Rules = {
    **blocks.embeddings(),
    f"{blocks.LAYER}.input_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
    **blocks.attention(biases=False),
    **blocks.gated_mlp(),
}


def _metadata(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata(arch, config, d),
        **blocks.layer_norm_epsilon(config),
        Keys.LLM.LOGIT_SCALE: config.number("logit_scale", default=0.0625),
        Keys.Rope.SCALING_TYPE: "none",
    }


def _command_r(config: Config, d: Dims) -> Metadata:
    found = _metadata("command-r", config, d)
    if config.has("model_max_length"):  # The context in training; the default is smaller.
        found[Keys.LLM.CONTEXT_LENGTH] = config.integer("model_max_length")
    return found


def _cohere2(config: Config, d: Dims) -> Metadata:
    return _metadata("cohere2", config, d) | blocks.windows(config, d, period=4)


def _check(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    blocks.require(config, "head_dim", d.n_embd // d.n_head)
    blocks.require_default_rope(config)


def _check_command_r(config: Config, d: Dims) -> None:
    _check(config, d)
    blocks.require(config, "use_qk_norm", d.n_layers >= _LAYERS_WITH_HEAD_NORMS, False)


COMMAND_R = Family(
    architecture="command-r",
    names=("CohereForCausalLM",),
    rules={
        **_COMMON,
        f"{blocks.ATTENTION}.q_norm.weight": Rule(
            "blk.{i}.attn_q_norm.weight", lambda d: (d.n_head, d.head_dim), True, keep_f32=True
        ),
        f"{blocks.ATTENTION}.k_norm.weight": Rule(
            "blk.{i}.attn_k_norm.weight", lambda d: (d.n_head_kv, d.head_dim), True, keep_f32=True
        ),
    },
    metadata=_command_r,
    head="never",
    check=_check_command_r,
)

COHERE2 = Family(
    architecture="cohere2",
    names=("Cohere2ForCausalLM",),
    rules=_COMMON,
    metadata=_cohere2,
    head="never",
    check=_check,
)

FAMILIES = (COMMAND_R, COHERE2)
