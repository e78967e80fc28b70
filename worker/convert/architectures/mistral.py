"""Mistral 3's text part and Ministral 3: Llama's blocks, queries scaled by their position."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.llama import LLAMA
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config
from worker.errors import ModelError


def _mistral3(config: Config, d: Dims) -> Metadata:
    found = blocks.common_metadata("mistral3", config, d) | blocks.rms_norm(config)
    rope = config.rope().params
    for key, name in (
        (Keys.Rope.SCALING_YARN_BETA_FAST, "beta_fast"),
        (Keys.Rope.SCALING_YARN_BETA_SLOW, "beta_slow"),
    ):
        if rope.has(name):
            found[key] = rope.number(name)
    if rope.has("llama_4_scaling_beta"):
        found[Keys.Attention.TEMPERATURE_SCALE] = rope.number("llama_4_scaling_beta")
    return found


def _check(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    if config.text("model_type", "mistral") not in ("mistral", "ministral3"):
        raise ModelError(
            f"{config.name}: model_type {config.values['model_type']!r} cannot be converted"
        )


MINISTRAL3 = Family(
    architecture="mistral3",
    names=("Ministral3ForCausalLM",),
    rules=LLAMA.rules,
    metadata=_mistral3,
    check=_check,
)

MISTRAL3 = Family(
    architecture="mistral3",
    names=("Mistral3ForConditionalGeneration",),
    rules=LLAMA.rules,
    metadata=_mistral3,
    roots=("model.", "model.language_model.", "language_model.model."),
    section="text_config",
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    check=_check,
)
"""The vision tensors are left out."""

FAMILIES = (MINISTRAL3, MISTRAL3)
