"""OLMo 2, 3 and OLMoE: norms after attention and feed-forward, and across all heads of q and k."""

from __future__ import annotations

from dataclasses import replace

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule
from worker.convert.config import Config
from worker.errors import ModelError


def _olmo2(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("olmo2", config, d) | blocks.rms_norm(config)


OLMO2 = Family(
    architecture="olmo2",
    names=("Olmo2ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.attention(biases=False),
        **blocks.gated_mlp(),
        f"{blocks.ATTENTION}.q_norm.weight": Rule(
            "blk.{i}.attn_q_norm.weight", lambda d: (d.q_rows,)
        ),
        f"{blocks.ATTENTION}.k_norm.weight": Rule(
            "blk.{i}.attn_k_norm.weight", lambda d: (d.kv_rows,)
        ),
        f"{blocks.LAYER}.post_attention_layernorm.weight": blocks.norm(
            "blk.{i}.post_attention_norm"
        ),
        f"{blocks.LAYER}.post_feedforward_layernorm.weight": blocks.norm("blk.{i}.post_ffw_norm"),
    },
    metadata=_olmo2,
    head="always",
    check=blocks.require_silu,
)


def _olmo3(config: Config, d: Dims) -> Metadata:
    return _olmo2(config, d) | blocks.windows(config, d, period=4)


def _check_olmo3(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    local = config.rope("sliding_attention")
    if config.section("rope_parameters").has("sliding_attention"):
        if local.kind != "default" or local.theta != config.rope().theta:
            raise ModelError(
                f"{config.name}: within windows llama.cpp's olmo2 rotates without scaling and by "
                "the same rope_theta as elsewhere"
            )


OLMO3 = replace(OLMO2, names=("Olmo3ForCausalLM",), metadata=_olmo3, check=_check_olmo3)


def _olmoe_dims(config: Config) -> Dims:
    d = Dims.of(config)
    return replace(d, n_expert=config.integer("num_experts"), n_ff_expert=d.n_ff)


def _olmoe(config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata("olmoe", config, d),
        **blocks.rms_norm(config),
        **experts.expert_metadata(config, d),
    }


def _check_olmoe(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    blocks.require(config, "norm_topk_prob", False)
    blocks.require(config, "num_key_value_heads", d.n_head)
    blocks.require(config, "clip_qkv", None)


OLMOE = Family(
    architecture="olmoe",
    names=("OlmoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(biases=False),
        **{name: rule for name, rule in OLMO2.rules.items() if "self_attn" in name},
        **experts.router(f"{blocks.MLP}.gate.weight"),
        **experts.experts(f"{blocks.MLP}.experts", "gate_proj", "up_proj", "down_proj"),
    },
    metadata=_olmoe,
    dims=_olmoe_dims,
    head="always",
    check=_check_olmoe,
)

FAMILIES = (OLMO2, OLMO3, OLMOE)
