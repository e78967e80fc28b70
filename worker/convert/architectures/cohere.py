"""Cohere's Command-R and Command-R7B: attention and feed-forward in parallel, behind one norm."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata, Rules
from worker.convert.config import Config

_LAYERS_WITH_HEAD_NORMS = 64
"""llama.cpp reads norms of heads only in models with at least this many layers."""
_COMMON: Rules = {
    **blocks.embeddings(),
    **blocks.norms(input_layernorm="attn_norm"),
    **blocks.attention(biases=False),
    **blocks.gated_mlp(),
}


def _cohere(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata(arch, config, d),
        **blocks.layer_norm_epsilon(config),
        Keys.LLM.LOGIT_SCALE: config.number("logit_scale", default=0.0625),
        Keys.Rope.SCALING_TYPE: "none",
    }


def _command_r(arch: str, config: Config, d: Dims) -> Metadata:
    found = _cohere(arch, config, d)
    if config.has("model_max_length"):  # The context in training; the default is smaller.
        found[Keys.LLM.CONTEXT_LENGTH] = config.integer("model_max_length")
    return found


def _cohere2(arch: str, config: Config, d: Dims) -> Metadata:
    return _cohere(arch, config, d) | blocks.windows(config, d, period=4)


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", head_dim=d.n_embd // d.n_head)
    blocks.require_default_rope(config)


def _check_command_r(config: Config, d: Dims) -> None:
    _check(config, d)
    blocks.require(config, use_qk_norm=(d.n_layers >= _LAYERS_WITH_HEAD_NORMS, False))


COMMAND_R = Family(
    architecture="command-r",
    names=("CohereForCausalLM",),
    rules={
        **_COMMON,
        **blocks.norm_per_head("q_norm", "k_norm"),
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
