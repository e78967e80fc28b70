"""Cohere's Command-R and Command-R7B: attention and feed-forward in parallel, behind one norm."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.layers import GATED
from worker.convert.family.metadata import number, require, require_default_rope
from worker.convert.family.rules import Family
from worker.convert.family.sizes import HEAD, HEADS, KV_HEADS, Dims

_LAYERS_WITH_HEAD_NORMS = 64
"""llama.cpp reads norms of heads only in models with at least this many layers."""
_LAYER = f"attn_norm attn_q attn_k attn_v attn_output {GATED}"


def _check(config: Config, d: Dims) -> None:
    require(config, head_dim=d.n_embd // d.n_head)
    require_default_rope(config, d)


def _check_command_r(config: Config, d: Dims) -> None:
    _check(config, d)
    require(config, use_qk_norm=(d.n_layers >= _LAYERS_WITH_HEAD_NORMS, False))


COHERE2 = Family(
    "cohere2",
    ("Cohere2ForCausalLM",),
    _LAYER,
    norm="layer",
    windows=4,
    metadata={
        Keys.LLM.LOGIT_SCALE: number("logit_scale", default=0.0625),
        Keys.Rope.SCALING_TYPE: "none",
    },
    head="never",
    check=_check,
)

COMMAND_R = replace(
    COHERE2,
    architecture="command-r",
    names=("CohereForCausalLM",),
    layers=f"{_LAYER} attn_q_norm? attn_k_norm?",
    shapes={"attn_q_norm": (HEADS, HEAD), "attn_k_norm": (KV_HEADS, HEAD)},
    windows=0,
    metadata={
        **COHERE2.metadata,
        # The context in training; `max_position_embeddings` is smaller.
        Keys.LLM.CONTEXT_LENGTH: lambda config, d: config.integer(
            "model_max_length", "max_position_embeddings"
        ),
    },
    check=_check_command_r,
)
