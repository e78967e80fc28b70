"""Llama 4's text part: experts in every layer or every other, windows in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import (
    Array,
    Dims,
    Family,
    Make,
    Metadata,
    Rule,
    Rules,
    transposed,
)
from worker.convert.config import Config

_FEED_FORWARD = f"{blocks.LAYER}.feed_forward"
_EXPERTS = f"{_FEED_FORWARD}.experts"


def _dims(config: Config) -> Dims:
    d = Dims.of(config)
    step = config.integer("interleave_moe_layer_step", default=1)
    kinds = tuple("experts" if (i + 1) % step == 0 else "dense" for i in range(d.n_layers))
    return replace(
        d,
        n_ff=config.integer("intermediate_size_mlp"),
        n_expert=config.integer("num_local_experts"),
        n_ff_expert=d.n_ff,
        n_ff_shared=d.n_ff,
        kinds=kinds,
    )


def _half(first: bool) -> Make:
    """Gate (the first half) or up of an expert's outputs; stored as (inputs, outputs)."""

    def make(sources: Sequence[Array], d: Dims) -> Array:
        columns = slice(0, d.n_ff_expert) if first else slice(d.n_ff_expert, None)
        return np.ascontiguousarray(sources[0][:, columns].T)

    return make


def _expert_rules() -> Rules:
    return {
        **experts.router(f"{_FEED_FORWARD}.router.weight"),
        f"{_EXPERTS}.gate_up_proj": (
            Rule("blk.{i}.ffn_gate_exps.weight", experts.up, make=_half(True), per_expert=True),
            Rule("blk.{i}.ffn_up_exps.weight", experts.up, make=_half(False), per_expert=True),
        ),
        f"{_EXPERTS}.down_proj": Rule(
            "blk.{i}.ffn_down_exps.weight", experts.down, make=transposed, per_expert=True
        ),
        **experts.shared_experts(f"{_FEED_FORWARD}.shared_expert"),
    }


def _llama4(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.rms_metadata(arch, config, d),
        **experts.expert_metadata(config, d),
        Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: config.integer("interleave_moe_layer_step", default=1),
    }


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", attention_bias=False, attention_chunk_size=8192)
    blocks.require(config, floor_scale=8192, attn_scale=0.1, use_qk_norm=d.n_expert != 128)
    pattern = [int((i + 1) % 4 != 0) for i in range(d.n_layers)]
    blocks.require(config, no_rope_layers=(pattern, []))


LLAMA4 = Family(
    architecture="llama4",
    names=("Llama4ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(biases=False),
        **experts.only("dense", blocks.gated_mlp(_FEED_FORWARD)),
        **experts.only("experts", _expert_rules()),
    },
    metadata=_llama4,
    dims=_dims,
    extra_tensors=blocks.llama3_factors,
    check=_check,
)

LLAMA4_MULTIMODAL = replace(
    LLAMA4,
    names=("Llama4ForConditionalGeneration",),
    section="text_config",
    roots=("model.", "language_model.model.", "model.language_model."),
    ignored=(r"(model\.)?(vision_model|multi_modal_projector)\..*",),
)
"""The text part; the vision tensors are left out."""

FAMILIES = (LLAMA4, LLAMA4_MULTIMODAL)
