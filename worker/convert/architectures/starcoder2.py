"""StarCoder 2: layer norms and biases throughout, GELU without a gate."""

from __future__ import annotations

from worker.convert.family.layers import ATTENTION
from worker.convert.family.rules import Family

STARCODER2 = Family(
    "starcoder2",
    ("Starcoder2ForCausalLM",),
    f"attn_norm+ {ATTENTION} ffn_norm+ ffn_up+ ffn_down+",
    model="token_embd output_norm+ output?",
    norm="layer",
    ignores_window=True,
    requires={"hidden_act": ("gelu_pytorch_tanh", "gelu_new"), "use_bias": True},
)
