"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Rule, Rules
from worker.convert.config import Config
from worker.errors import ModelError


def shared_expert() -> Rules:
    return {
        **experts.shared_experts(f"{blocks.MLP}.shared_expert"),
        f"{blocks.MLP}.shared_expert_gate.weight": Rule(
            "blk.{i}.ffn_gate_inp_shexp.weight", lambda d: (1, d.n_embd), keep_f32=True
        ),
    }


def expert_rules() -> Rules:
    """Experts as one tensor each, as checkpoints have them, or fused, as transformers holds
    them."""
    return {
        **experts.router(f"{blocks.MLP}.gate.weight"),
        **experts.experts(f"{blocks.MLP}.experts"),
        **experts.fused_experts(f"{blocks.MLP}.experts"),
    }


def _expert_dims(config: Config) -> Dims:
    return replace(
        Dims.of(config),
        n_expert=config.integer("num_experts", "num_local_experts"),
        n_ff_expert=config.integer("moe_intermediate_size"),
    )


def _qwen2_expert_dims(config: Config) -> Dims:
    shared = config.integer("shared_expert_intermediate_size")
    return replace(_expert_dims(config), n_ff_shared=shared)


_check = blocks.requires(hidden_act="silu", use_sliding_window=False)


def _check_experts(config: Config, d: Dims, *, normed: bool) -> None:
    _check(config, d)
    blocks.require(config, decoder_sparse_step=1, mlp_only_layers=([], None))
    if config.flag("norm_topk_prob") != normed:  # Absence means false, as in transformers.
        raise ModelError(
            f"{config.name}: norm_topk_prob is {not normed}, llama.cpp implements {normed}"
        )


QWEN2 = Family(
    architecture="qwen2",
    names=("Qwen2ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(),
        **blocks.gated_mlp(),
    },
    metadata=experts.metadata,
    check=_check,
)

QWEN2_MOE = Family(
    architecture="qwen2moe",
    names=("Qwen2MoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(),
        **expert_rules(),
        **shared_expert(),
    },
    metadata=experts.metadata,
    dims=_qwen2_expert_dims,
    head="always",
    check=partial(_check_experts, normed=False),
)

QWEN3 = Family(
    architecture="qwen3",
    names=("Qwen3ForCausalLM", "Qwen3Model"),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(),
        **blocks.head_norms(),
        **blocks.gated_mlp(),
    },
    metadata=experts.metadata,
    roots=("model.", ""),
    check=_check,
)

QWEN3_MOE = Family(
    architecture="qwen3moe",
    names=("Qwen3MoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(),
        **blocks.head_norms(),
        **expert_rules(),
    },
    metadata=experts.metadata,
    dims=_expert_dims,
    check=partial(_check_experts, normed=True),
)

FAMILIES = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
