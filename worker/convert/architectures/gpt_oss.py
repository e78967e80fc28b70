"""gpt-oss: experts with biases in MXFP4, attention sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from worker.convert.config import Config
from worker.convert.family.dims import Dims, with_experts
from worker.convert.family.rules import Array, Family, Into, Make, Sources, transposed


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


def _every_other(first: int, then: Make = lambda sources, _d: sources[0]) -> Make:
    """Gate or up, which alternate in the source."""
    return lambda sources, d: then([sources[0][..., first::2]], d)


def _packed(target: str, rows: slice, name: str) -> Into:
    return Into(target, (f"{name}_scales",), make=_mxfp4(rows), per_expert=True, kind="MXFP4")


_GATE, _UP, _DOWN = (f"ffn_{name}_exps" for name in ("gate", "up", "down"))
_GATE_UP, _DOWN_PROJ = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_SOURCES: Sources = {
    # As they are published, in MXFP4.
    f"{_GATE_UP}_blocks": (
        _packed(_GATE, slice(0, None, 2), _GATE_UP),
        _packed(_UP, slice(1, None, 2), _GATE_UP),
    ),
    f"{_DOWN_PROJ}_blocks": _packed(_DOWN, slice(None), _DOWN_PROJ),
    f"{_GATE_UP}_scales": (),
    f"{_DOWN_PROJ}_scales": (),
    # As transformers saves them.
    _GATE_UP: (
        Into(_GATE, make=_every_other(0, transposed), per_expert=True),
        Into(_UP, make=_every_other(1, transposed), per_expert=True),
    ),
    _DOWN_PROJ: Into(_DOWN, make=transposed, per_expert=True),
    f"{_GATE_UP}_bias": (
        Into(f"{_GATE}.bias", make=_every_other(0)),
        Into(f"{_UP}.bias", make=_every_other(1)),
    ),
}


def _notes(config: Config) -> Iterator[str]:
    if config.rope().params.values.get("truncate") is False:
        yield "llama.cpp rounds the ends of YaRN's ramp to whole dimensions; the source does not"


GPT_OSS = Family(
    "gpt-oss",
    ("GptOssForCausalLM",),
    sources=_SOURCES,
    windows=2,
    dims=with_experts("num_local_experts", width="intermediate_size"),
    head="always",
    yarn={"beta_fast": 32.0, "beta_slow": 1.0},  # It always rounds, see `_notes`.
    notes=_notes,
    requires={"hidden_act": "silu", "swiglu_limit": 7.0, "attention_bias": True},
)
