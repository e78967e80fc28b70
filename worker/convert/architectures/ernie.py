"""ERNIE 4.5, dense: Llama's blocks, with heads turned in neighbouring pairs as they are stored."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _ernie(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("ernie4_5", config, d) | blocks.rms_norm("ernie4_5", config)


def _check(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    blocks.require(config, "use_bias", False)


ERNIE4_5 = Family(
    architecture="ernie4_5",
    names=("Ernie4_5ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(biases=False),
        **blocks.gated_mlp(),
    },
    metadata=_ernie,
    check=_check,
)

FAMILIES = (ERNIE4_5,)
