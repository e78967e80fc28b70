"""OLMo 2, 3 and OLMoE: norms after attention and feed-forward, and across all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config
from worker.errors import ModelError

_HEAD_NORMS = blocks.weights(
    blocks.ATTENTION,
    {
        "q_norm": ("attn_q_norm", lambda d: (d.q_rows,)),
        "k_norm": ("attn_k_norm", lambda d: (d.kv_rows,)),
    },
)

OLMO2 = Family(
    architecture="olmo2",
    names=("Olmo2ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.attention(biases=False),
        **blocks.gated_mlp(),
        **_HEAD_NORMS,
        **blocks.norms(
            post_attention_layernorm="post_attention_norm",
            post_feedforward_layernorm="post_ffw_norm",
        ),
    },
    metadata=blocks.rms_metadata,
    head="always",
    check=blocks.requires(hidden_act="silu"),
)


def _olmo3(arch: str, config: Config, d: Dims) -> Metadata:
    return blocks.rms_metadata(arch, config, d) | blocks.windows(config, d, period=4)


def _check_olmo3(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu")
    local = config.rope("sliding_attention")
    if config.section("rope_parameters").has("sliding_attention"):
        if local.kind != "default" or local.theta != config.rope().theta:
            raise ModelError(
                f"{config.name}: within windows llama.cpp's olmo2 rotates without scaling and by "
                "the same rope_theta as elsewhere"
            )


OLMO3 = replace(OLMO2, names=("Olmo3ForCausalLM",), metadata=_olmo3, check=_check_olmo3)


def _check_olmoe(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", norm_topk_prob=False)
    blocks.require(config, num_key_value_heads=d.n_head, clip_qkv=None)


OLMOE = Family(
    architecture="olmoe",
    names=("OlmoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(biases=False),
        **_HEAD_NORMS,
        **experts.router(f"{blocks.MLP}.gate.weight"),
        **experts.experts(f"{blocks.MLP}.experts"),
    },
    metadata=experts.metadata,
    dims=lambda config: experts.dims(config, "num_experts"),
    head="always",
    check=_check_olmoe,
)

FAMILIES = (OLMO2, OLMO3, OLMOE)
