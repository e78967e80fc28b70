"""Nemotron: layer norms stored less one, a squared ReLU without a gate, partly rotated heads."""

from __future__ import annotations

from worker.convert.family.layers import ATTENTION
from worker.convert.family.rules import Family

NEMOTRON = Family(
    "nemotron",
    ("NemotronForCausalLM",),
    f"attn_norm+ {ATTENTION} ffn_norm+ ffn_up ffn_down",
    model="token_embd output_norm+ output?",
    norm="layer",
    norm_plus=1.0,
    rotary=0.5,
    head="always",
    requires={"hidden_act": "relu2"},
)
