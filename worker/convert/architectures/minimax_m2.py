"""MiniMax-M2: norms across all heads of q and k, partly rotated heads, experts in every layer."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.layers import EXPERTS, HEAD_NORMS, with_experts
from worker.convert.family.metadata import rotated
from worker.convert.family.rules import Family
from worker.convert.family.sizes import KV, Dims, Q


def _rotated(config: Config, d: Dims) -> int:
    return config.integer("rotary_dim", default=rotated(config, d.head_dim, 1.0))


MINIMAX_M2 = Family(
    "minimax-m2",
    ("MiniMaxM2ForCausalLM",),
    f"attn_norm attn_q attn_k attn_v attn_output {HEAD_NORMS} ffn_norm {EXPERTS} exp_probs_b.bias",
    sources={
        "ffn_gate_inp": ("block_sparse_moe.gate", "mlp.gate"),
        "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
        "exp_probs_b.bias": (
            "block_sparse_moe.e_score_correction_bias",
            "mlp.e_score_correction_bias",
        ),
    },
    shapes={"attn_q_norm": (Q,), "attn_k_norm": (KV,)},
    metadata={Keys.Rope.DIMENSION_COUNT: _rotated, Keys.LLM.EXPERT_GATING_FUNC: 2},
    dims=with_experts("num_local_experts", width="intermediate_size"),
    ignored=(r"model\.(mtp|layers\.\d+\.mtp).*",),
    requires={"hidden_act": "silu", "use_qk_norm": True, "scoring_func": "sigmoid"},
)
