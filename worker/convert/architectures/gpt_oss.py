"""gpt-oss: experts with biases in MXFP4, attention sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Array, Dims, Family, Make, Metadata, Rule, Rules
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


def _dims(config: Config) -> Dims:
    d = Dims.of(config)
    return replace(d, n_expert=config.integer("num_local_experts"), n_ff_expert=d.n_ff)


def _expert_rules() -> Rules:
    def up(d: Dims) -> tuple[int, ...]:
        return (d.n_expert, d.n_ff_expert, d.n_embd)

    def down(d: Dims) -> tuple[int, ...]:
        return (d.n_expert, d.n_embd, d.n_ff_expert)

    def n_expert(d: Dims) -> int:
        return d.n_expert

    def packed(
        target: str, source: str, shape: Callable[[Dims], tuple[int, ...]], rows: slice
    ) -> Rule:
        scales = f"{_EXPERTS}.{source}_scales"
        return Rule(
            f"blk.{{i}}.{target}_exps.weight",
            shape,
            make=_mxfp4(rows),
            also=(scales,),
            slices=n_expert,
            kind="MXFP4",
        )

    def plain(target: str, shape: Callable[[Dims], tuple[int, ...]], make: Make) -> Rule:
        return Rule(f"blk.{{i}}.{target}_exps.weight", shape, make=make, slices=n_expert)

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
        f"{_EXPERTS}.down_proj": plain(
            "ffn_down", down, lambda s, _d: np.ascontiguousarray(s[0].swapaxes(-1, -2))
        ),
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


def _metadata(config: Config, d: Dims) -> Metadata:
    return {
        **blocks.common_metadata("gpt-oss", config, d),
        **blocks.rms_norm(config),
        **experts.expert_metadata(config, d),
        **blocks.windows(config, d, period=2),
    }


def _notes(config: Config) -> Iterator[str]:
    if config.rope().params.values.get("truncate") is False:
        yield "llama.cpp rounds the ends of YaRN's ramp to whole dimensions, the source does not"


def _check(config: Config, d: Dims) -> None:
    blocks.require_silu(config, d)
    blocks.require(config, "swiglu_limit", 7.0)


GPT_OSS = Family(
    architecture="gpt-oss",
    names=("GptOssForCausalLM",),
    rules={
        **blocks.embeddings(),
        f"{blocks.LAYER}.input_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
        f"{blocks.LAYER}.post_attention_layernorm.weight": blocks.norm(
            "blk.{i}.post_attention_norm"
        ),
        **blocks.attention(),
        f"{blocks.ATTENTION}.sinks": Rule("blk.{i}.attn_sinks.weight", lambda d: (d.n_head,)),
        **experts.router(f"{blocks.MLP}.router.weight"),
        f"{blocks.MLP}.router.bias": Rule("blk.{i}.ffn_gate_inp.bias", lambda d: (d.n_expert,)),
        **_expert_rules(),
    },
    metadata=_metadata,
    dims=_dims,
    head="always",
    notes=_notes,
    check=_check,
)

FAMILIES = (GPT_OSS,)
