"""OLMo 2, 3 and OLMoE: norms after attention and feed-forward, and across all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from worker.convert.config import Config
from worker.convert.family.layers import EXPERTS, GATED, HEAD_NORMS, with_experts
from worker.convert.family.metadata import require
from worker.convert.family.rules import Family
from worker.convert.family.sizes import KV, Dims, Q
from worker.errors import ModelError

_ATTENTION = f"attn_q attn_k attn_v attn_output {HEAD_NORMS}"

OLMO2 = Family(
    "olmo2",
    ("Olmo2ForCausalLM",),
    f"{_ATTENTION} {GATED} post_attention_norm post_ffw_norm",
    shapes={"attn_q_norm": (Q,), "attn_k_norm": (KV,)},
    head="always",
)


def _check_olmo3(config: Config, d: Dims) -> None:
    local = config.rope("sliding_attention")
    if config.section("rope_parameters").has("sliding_attention"):
        if local.kind != "default" or local.theta != config.rope().theta:
            raise ModelError(
                f"{config.name}: within windows llama.cpp's olmo2 rotates without scaling and by "
                "the same rope_theta as elsewhere"
            )


OLMO3 = replace(OLMO2, names=("Olmo3ForCausalLM",), windows=4, check=_check_olmo3)


def _check_olmoe(config: Config, d: Dims) -> None:
    require(config, norm_topk_prob=False, num_key_value_heads=d.n_head, clip_qkv=None)


OLMOE = replace(
    OLMO2,
    architecture="olmoe",
    names=("OlmoeForCausalLM",),
    layers=f"attn_norm {_ATTENTION} ffn_norm {EXPERTS}",
    dims=with_experts("num_experts", width="intermediate_size"),
    check=_check_olmoe,
)
