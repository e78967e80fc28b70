"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from worker.convert.config import Config
from worker.convert.family.layers import ATTENTION, EXPERTS, GATED, HEAD_NORMS, SHARED, with_experts
from worker.convert.family.metadata import SHARED_WIDTH
from worker.convert.family.rules import Family
from worker.convert.family.sizes import Dims
from worker.errors import ModelError

_DENSE = {"hidden_act": "silu", "use_sliding_window": False}
_SPARSE = {**_DENSE, "decoder_sparse_step": 1, "mlp_only_layers": ([], None)}


def _check_experts(normed: bool) -> Callable[[Config, Dims], None]:
    def check(config: Config, d: Dims) -> None:
        if config.flag("norm_topk_prob") != normed:  # Absence means false, as in transformers.
            raise ModelError(
                f"{config.name}: norm_topk_prob is {not normed}, llama.cpp implements {normed}"
            )

    return check


QWEN2 = Family(
    "qwen2", ("Qwen2ForCausalLM",), f"attn_norm {ATTENTION} ffn_norm {GATED}", requires=_DENSE
)

QWEN2_MOE = Family(
    "qwen2moe",
    ("Qwen2MoeForCausalLM",),
    f"attn_norm {ATTENTION} ffn_norm {EXPERTS} {SHARED} ffn_gate_inp_shexp",
    metadata=SHARED_WIDTH,
    dims=with_experts(
        "num_experts", "num_local_experts", shared_width="shared_expert_intermediate_size"
    ),
    head="always",
    requires=_SPARSE,
    check=_check_experts(normed=False),
)

QWEN3 = Family(
    "qwen3",
    ("Qwen3ForCausalLM", "Qwen3Model"),
    f"attn_norm {ATTENTION} {HEAD_NORMS} ffn_norm {GATED}",
    roots=("model.", ""),
    requires=_DENSE,
)

QWEN3_MOE = replace(
    QWEN3,
    architecture="qwen3moe",
    names=("Qwen3MoeForCausalLM",),
    layers=f"attn_norm {ATTENTION} {HEAD_NORMS} ffn_norm {EXPERTS}",
    roots=("model.",),
    dims=with_experts("num_experts", "num_local_experts"),
    requires=_SPARSE,
    check=_check_experts(normed=True),
)
