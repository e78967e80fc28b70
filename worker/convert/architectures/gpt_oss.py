"""gpt-oss: experts with biases in MXFP4, attention sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import (
    Array,
    Dims,
    Family,
    Make,
    Metadata,
    Rule,
    Rules,
    Shape,
    transposed,
)
from worker.convert.config import Config

_EXPERTS = f"{blocks.MLP}.experts"


def _mxfp4(rows: slice) -> Make:
    """Reorder MXFP4 for ggml: blocks of 32 four-bit values with one scale.

    A byte of the source holds two neighbours, the first in its lower half. A byte of ggml holds two
    values sixteen places apart, and the scale precedes them.
    """

    def make(sources: Sequence[Array], _d: Dims) -> Array:
        blocks, scales = (source[rows] for source in sources)
        values = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
        paired = values[..., :16] | values[..., 16:] << 4
        return np.concatenate([scales[..., None], paired], axis=-1, dtype=np.uint8)

    return make


def _every_other(first: int) -> Make:
    """Gate or up, which alternate in the source; experts are stored as (inputs, outputs)."""
    return lambda sources, _d: np.ascontiguousarray(sources[0][..., first::2].swapaxes(-1, -2))


def _every_other_bias(first: int) -> Make:
    return lambda sources, _d: np.ascontiguousarray(sources[0][..., first::2])


def _expert_rules() -> Rules:
    up, down = experts.up, experts.down

    def plain(target: str, shape: Shape, make: Make) -> Rule:
        return Rule(f"blk.{{i}}.{target}_exps.weight", shape, make=make, per_expert=True)

    def packed(target: str, source: str, shape: Shape, rows: slice) -> Rule:
        scales = f"{_EXPERTS}.{source}_scales"
        return replace(plain(target, shape, _mxfp4(rows)), also=(scales,), kind="MXFP4")

    return {
        f"{_EXPERTS}.gate_up_proj_blocks": (
            packed("ffn_gate", "gate_up_proj", up, slice(0, None, 2)),
            packed("ffn_up", "gate_up_proj", up, slice(1, None, 2)),
        ),
        f"{_EXPERTS}.down_proj_blocks": packed("ffn_down", "down_proj", down, slice(None)),
        f"{_EXPERTS}.gate_up_proj": (
            plain("ffn_gate", up, _every_other(0)),
            plain("ffn_up", up, _every_other(1)),
        ),
        f"{_EXPERTS}.down_proj": plain("ffn_down", down, transposed),
        f"{_EXPERTS}.gate_up_proj_bias": tuple(
            Rule(
                f"blk.{{i}}.ffn_{name}_exps.bias",
                lambda d: (d.n_expert, d.n_ff_expert),
                make=_every_other_bias(first),
                keep_f32=True,
            )
            for first, name in enumerate(("gate", "up"))
        ),
        f"{_EXPERTS}.down_proj_bias": Rule(
            "blk.{i}.ffn_down_exps.bias", lambda d: (d.n_expert, d.n_embd), keep_f32=True
        ),
    }


def _metadata(arch: str, config: Config, d: Dims) -> Metadata:
    return experts.metadata(arch, config, d) | blocks.windows(config, d, period=2)


def _notes(config: Config) -> Iterator[str]:
    if config.rope().params.values.get("truncate") is False:
        yield "llama.cpp rounds the ends of YaRN's ramp to whole dimensions, the source does not"


GPT_OSS = Family(
    architecture="gpt-oss",
    names=("GptOssForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.norms(input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm"),
        **blocks.attention(),
        f"{blocks.ATTENTION}.sinks": Rule("blk.{i}.attn_sinks.weight", lambda d: (d.n_head,)),
        **experts.router(f"{blocks.MLP}.router.weight"),
        f"{blocks.MLP}.router.bias": Rule("blk.{i}.ffn_gate_inp.bias", lambda d: (d.n_expert,)),
        **_expert_rules(),
    },
    metadata=_metadata,
    dims=lambda config: experts.dims(config, "num_local_experts"),
    head="always",
    notes=_notes,
    check=blocks.requires(hidden_act="silu", swiglu_limit=7.0),
)

FAMILIES = (GPT_OSS,)
