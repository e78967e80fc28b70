"""Seed-OSS."""

from __future__ import annotations

from worker.convert.family.layers import ATTENTION, GATED
from worker.convert.family.rules import Family

SEED_OSS = Family(
    "seed_oss",
    ("SeedOssForCausalLM",),
    f"attn_norm {ATTENTION} post_attention_norm {GATED}",
    requires={"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
)
