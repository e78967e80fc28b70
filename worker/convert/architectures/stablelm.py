"""StableLM: layer norms with biases, partly rotated heads."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.family.layers import ATTENTION, GATED
from worker.convert.family.metadata import flag
from worker.convert.family.rules import Family
from worker.convert.family.sizes import HEAD, HEADS, KV_HEADS

STABLELM = Family(
    "stablelm",
    ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    # No ffn_norm if attention and feed-forward run in parallel behind one norm.
    f"attn_norm+ ffn_norm? ffn_norm.bias? {ATTENTION} attn_q_norm? attn_k_norm? {GATED}",
    model="token_embd output_norm+ output?",
    # StableLM 2 12B has a separate norm for each head.
    sources={
        "attn_q_norm": "self_attn.q_layernorm.norms.{e}",
        "attn_k_norm": "self_attn.k_layernorm.norms.{e}",
    },
    shapes={"attn_q_norm": (HEADS, HEAD), "attn_k_norm": (KV_HEADS, HEAD)},
    norm="layer",
    rotary=0.25,
    metadata={Keys.LLM.USE_PARALLEL_RESIDUAL: flag("use_parallel_residual")},
    head="always",
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
