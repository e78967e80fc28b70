"""Arcee: Llama's attention, a squared ReLU without a gate."""

from __future__ import annotations

from worker.convert.family.layers import ATTENTION
from worker.convert.family.metadata import llama3_factors
from worker.convert.family.rules import Family

ARCEE = Family(
    "arcee",
    ("ArceeForCausalLM",),
    f"attn_norm {ATTENTION} ffn_norm ffn_up~ ffn_down~",
    interleaved=True,
    scales_as_llama3=True,
    extra_tensors=llama3_factors,
    requires={"hidden_act": "relu2"},
)
