"""Seed-OSS: Llama's blocks with biases on q, k and v."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _seed_oss(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("seed_oss", config, d) | blocks.rms_norm(config)


def _check(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    blocks.require(config, "attention_out_bias", False)
    blocks.require(config, "mlp_bias", False)


SEED_OSS = Family(
    architecture="seed_oss",
    names=("SeedOssForCausalLM",),
    rules={
        **blocks.embeddings(),
        f"{blocks.LAYER}.input_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
        f"{blocks.LAYER}.post_attention_layernorm.weight": blocks.norm(
            "blk.{i}.post_attention_norm"
        ),
        **blocks.attention(),
        **blocks.gated_mlp(),
    },
    metadata=_seed_oss,
    check=_check,
)

FAMILIES = (SEED_OSS,)
