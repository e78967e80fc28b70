"""Granite: Llama's blocks with additional scales; dense, with experts, and with state spaces."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks, experts, state_space
from worker.convert.architectures.llama import DENSE
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules, Shape
from worker.convert.config import Config
from worker.errors import ModelError


def _granite(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.rms_metadata(arch, config, d),
        Keys.Attention.SCALE: config.number("attention_multiplier", default=1.0),
        Keys.LLM.EMBEDDING_SCALE: config.number("embedding_multiplier", default=1.0),
        Keys.LLM.RESIDUAL_SCALE: config.number("residual_multiplier", default=1.0),
        Keys.LLM.LOGIT_SCALE: config.number("logits_scaling", default=1.0),
    }


GRANITE = Family(
    architecture="granite",
    names=("GraniteForCausalLM",),
    rules=DENSE,
    metadata=_granite,
    extra_tensors=blocks.llama3_factors,
    check=blocks.requires(hidden_act="silu"),
)

_MOE = f"{blocks.LAYER}.block_sparse_moe"


def _moe_dims(config: Config) -> Dims:
    d = Dims.of(config)
    return replace(
        d,
        n_expert=int(config.values.get("num_local_experts") or 0),
        n_ff_expert=d.n_ff,
        n_ff_shared=int(config.values.get("shared_intermediate_size") or 0),
    )


def _moe(arch: str, config: Config, d: Dims) -> Metadata:
    found = _granite(arch, config, d)
    if d.n_expert:
        found |= experts.expert_metadata(config, d)
        found[Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH] = d.n_ff_shared
    return found


def _halves(suffix: str, shape: Shape) -> tuple[Rule, ...]:
    """Gate and up are halves of one tensor, or of each expert in a stack."""

    def size(d: Dims) -> int:
        return shape(d)[-2]

    return (
        Rule(f"blk.{{i}}.ffn_gate{suffix}.weight", shape, rows=lambda d: (0, size(d))),
        Rule(f"blk.{{i}}.ffn_up{suffix}.weight", shape, rows=lambda d: (size(d), size(d))),
    )


_SHARED: Rules = {
    f"{blocks.LAYER}.shared_mlp.input_linear.weight": _halves(
        "_shexp", lambda d: (d.n_ff_shared, d.n_embd)
    ),
    f"{blocks.LAYER}.shared_mlp.output_linear.weight": Rule(
        "blk.{i}.ffn_down_shexp.weight", lambda d: (d.n_embd, d.n_ff_shared)
    ),
}

_EXPERTS: Rules = {
    **experts.router(f"{_MOE}.router.layer.weight"),
    f"{_MOE}.input_linear.weight": _halves("_exps", experts.up),
    f"{_MOE}.output_linear.weight": Rule("blk.{i}.ffn_down_exps.weight", experts.down),
}

GRANITE_MOE = Family(
    architecture="granitemoe",
    names=("GraniteMoeForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(interleaved=True),
        **_EXPERTS,
    },
    metadata=_moe,
    dims=_moe_dims,
    extra_tensors=blocks.llama3_factors,
    check=blocks.requires(hidden_act="silu"),
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    names=("GraniteMoeSharedForCausalLM",),
    rules={**GRANITE_MOE.rules, **_SHARED},
)


def _hybrid_dims(config: Config) -> Dims:
    given = map(str, config.items("layer_types"))
    kinds = tuple("attention" if "att" in k and "linear" not in k else "mamba" for k in given)
    d = replace(_moe_dims(config), kinds=kinds)
    return state_space.with_sizes(d, config, config.integer("mamba_n_heads"))


def _hybrid(arch: str, config: Config, d: Dims) -> Metadata:
    found = _moe(arch, config, d) | state_space.metadata(d)
    found[Keys.Attention.HEAD_COUNT_KV] = [
        d.n_head_kv if kind == "attention" else 0 for kind in d.kinds
    ]
    found[Keys.Rope.SCALING_FINETUNED] = False  # Switches off all rotation.
    if not d.n_expert:
        found[Keys.LLM.FEED_FORWARD_LENGTH] = d.n_ff_shared
    return found


def _check_hybrid(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", position_embedding_type="nope")
    if d.more["inner"] != 2 * d.n_embd:
        raise ModelError(f"{config.name}: llama.cpp's granitehybrid has mamba_expand 2 only")


GRANITE_HYBRID = Family(
    architecture="granitehybrid",
    names=("GraniteMoeHybridForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **experts.only("attention", blocks.attention(interleaved=True, biases=False)),
        **experts.only("mamba", state_space.mamba2(f"{blocks.LAYER}.mamba")),
        **_EXPERTS,
        **_SHARED,
    },
    metadata=_hybrid,
    dims=_hybrid_dims,
    check=_check_hybrid,
)

FAMILIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_HYBRID)
