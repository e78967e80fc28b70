"""Qwen 2 and 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules
from worker.convert.config import Config
from worker.errors import ModelError

_MLP = "model.layers.{i}.mlp"


def shared_expert() -> Rules:
    return {
        **experts.shared_experts(f"{_MLP}.shared_expert"),
        f"{_MLP}.shared_expert_gate.weight": Rule(
            "blk.{i}.ffn_gate_inp_shexp.weight", lambda d: (1, d.n_embd), keep_f32=True
        ),
    }


def expert_rules() -> Rules:
    """Experts as one tensor each, as checkpoints have them, or fused, as transformers holds
    them."""
    return {
        **experts.router(f"{_MLP}.gate.weight"),
        **experts.experts(f"{_MLP}.experts", "gate_proj", "up_proj", "down_proj"),
        **experts.fused_experts(f"{_MLP}.experts"),
    }


def _metadata(arch: str, config: Config, d: Dims) -> Metadata:
    found = blocks.common_metadata(arch, config, d) | blocks.rms_norm(config)
    if d.n_expert:
        found |= experts.expert_metadata(config, d)
    if d.n_ff_shared:
        found[Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH] = d.n_ff_shared
    return found


def _expert_dims(config: Config) -> Dims:
    return replace(
        Dims.of(config),
        n_expert=config.integer("num_experts", "num_local_experts"),
        n_ff_expert=config.integer("moe_intermediate_size"),
    )


def _qwen2_expert_dims(config: Config) -> Dims:
    shared = config.integer("shared_expert_intermediate_size")
    return replace(_expert_dims(config), n_ff_shared=shared)


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, "hidden_act", "silu")
    blocks.require(config, "use_sliding_window", False)


def _check_experts(config: Config, *, normed: bool) -> None:
    blocks.require(config, "decoder_sparse_step", 1)
    blocks.require(config, "mlp_only_layers", [], None)
    if config.flag("norm_topk_prob") != normed:  # Absence means false, as in transformers.
        raise ModelError(
            f"{config.name}: norm_topk_prob is {not normed}, llama.cpp implements {normed}"
        )


def _check_qwen2_experts(config: Config, d: Dims) -> None:
    _check(config, d)
    _check_experts(config, normed=False)


def _check_qwen3_experts(config: Config, d: Dims) -> None:
    _check(config, d)
    _check_experts(config, normed=True)


QWEN2 = Family(
    architecture="qwen2",
    names=("Qwen2ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(),
        **blocks.gated_mlp(),
    },
    metadata=lambda config, d: _metadata("qwen2", config, d),
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
    metadata=lambda config, d: _metadata("qwen2moe", config, d),
    dims=_qwen2_expert_dims,
    head="always",
    check=_check_qwen2_experts,
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
    metadata=lambda config, d: _metadata("qwen3", config, d),
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
    metadata=lambda config, d: _metadata("qwen3moe", config, d),
    dims=_expert_dims,
    check=_check_qwen3_experts,
)

FAMILIES = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE)
