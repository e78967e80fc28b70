"""ERNIE 4.5, dense and with experts: rotary dimensions are stored as neighbouring pairs."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.layers import EXPERTS, GATED, SHARED, with_experts
from worker.convert.family.metadata import SHARED_WIDTH, integer, of_dims, require
from worker.convert.family.rules import Family
from worker.convert.family.sizes import Dims

_ATTENTION = "attn_norm attn_q attn_k attn_v attn_output ffn_norm"

ERNIE4_5 = Family(
    "ernie4_5",
    ("Ernie4_5ForCausalLM",),
    f"{_ATTENTION} {GATED}",
    requires={"hidden_act": "silu", "use_bias": False},
)


def _check(config: Config, d: Dims) -> None:
    require(config, moe_layer_end_index=(d.n_layers - 1, -1))


ERNIE4_5_MOE = Family(
    "ernie4_5-moe",
    ("Ernie4_5_MoeForCausalLM",),
    {"": _ATTENTION, "dense": GATED, "experts": f"{EXPERTS} {SHARED} exp_probs_b.bias"},
    sources={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    metadata={
        Keys.LLM.EXPERT_SHARED_COUNT: integer("moe_num_shared_experts"),
        **SHARED_WIDTH,
        Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: 1,
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: of_dims(lambda d: d.kinds.count("dense")),
    },
    n_used="moe_k",
    dims=with_experts(
        "moe_num_experts", n_shared="moe_num_shared_experts", n_dense="moe_layer_start_index"
    ),
    ignored=(r"model\.mtp_.*",),
    requires={"hidden_act": "silu", "use_bias": False, "moe_layer_interval": 1},
    check=_check,
)
