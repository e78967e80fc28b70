"""ERNIE 4.5, dense and with experts: rotary dimensions are stored as neighbouring pairs."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks, experts, qwen
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule
from worker.convert.architectures.state_space import as_stored
from worker.convert.config import Config

ERNIE4_5 = Family(
    architecture="ernie4_5",
    names=("Ernie4_5ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(biases=False),
        **blocks.gated_mlp(),
    },
    metadata=blocks.rms_metadata,
    check=blocks.requires(hidden_act="silu", use_bias=False),
)


def _moe(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.rms_metadata(arch, config, d),
        Keys.LLM.EXPERT_COUNT: d.n_expert,
        Keys.LLM.EXPERT_USED_COUNT: config.integer("moe_k"),
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: d.n_ff_expert,
        Keys.LLM.EXPERT_SHARED_COUNT: config.integer("moe_num_shared_experts"),
        Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: d.n_ff_shared,
        Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: 1,
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: d.kinds.count("dense"),
    }


def _moe_dims(config: Config) -> Dims:
    d, n_ff = Dims.of(config), config.integer("moe_intermediate_size")
    return replace(
        d,
        n_expert=config.integer("moe_num_experts"),
        n_ff_expert=n_ff,
        n_ff_shared=n_ff * config.integer("moe_num_shared_experts"),
        kinds=experts.leading_dense(d.n_layers, int(config.number("moe_layer_start_index"))),
    )


def _check_moe(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", use_bias=False, moe_layer_interval=1)
    blocks.require(config, moe_layer_end_index=(d.n_layers - 1, -1))


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    architecture="ernie4_5-moe",
    names=("Ernie4_5_MoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(biases=False),
        **experts.only("dense", blocks.gated_mlp()),
        **experts.only(
            "experts",
            qwen.expert_rules(),
            experts.shared_experts(f"{blocks.MLP}.shared_experts"),
        ),
        f"{blocks.MLP}.moe_statics.e_score_correction_bias": Rule(
            "blk.{i}.exp_probs_b.bias",
            lambda d: (d.n_expert,),
            make=as_stored,
            on="experts",
            keep_f32=True,
        ),
    },
    metadata=_moe,
    dims=_moe_dims,
    ignored=(r"model\.mtp_.*",),
    check=_check_moe,
)

FAMILIES = (ERNIE4_5, ERNIE4_5_MOE)
