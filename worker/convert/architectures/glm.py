"""GLM-4 of 2025, dense and with experts: partly rotated heads."""

from __future__ import annotations

from worker.convert.family.layers import ATTENTION, EXPERTS, GATED, SHARED, with_experts
from worker.convert.family.metadata import as_deepseek
from worker.convert.family.rules import Family
from worker.convert.family.sizes import EMBD, FF

GLM4 = Family(
    "glm4",
    ("Glm4ForCausalLM",),
    f"attn_norm {ATTENTION} post_attention_norm ffn_norm ffn_up ffn_down post_ffw_norm",
    sources={
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    shapes={"ffn_up": (2 * FF, EMBD)},
    rotary=0.5,
)

GLM4_MOE = Family(
    "glm4moe",
    ("Glm4MoeForCausalLM",),
    {
        "": f"attn_norm {ATTENTION} attn_q_norm? attn_k_norm? post_attention_norm",
        "dense": GATED,
        "experts": f"{EXPERTS} exp_probs_b.bias {SHARED}",
    },
    rotary=0.5,
    metadata=as_deepseek(gating=2),
    dims=with_experts(
        "n_routed_experts", n_shared="n_shared_experts", n_dense="first_k_dense_replace"
    ),
    ignores_extra_layers=True,
    requires={"hidden_act": "silu", "n_group": 1},
)
