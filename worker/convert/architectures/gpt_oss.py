"""gpt-oss: experts with biases in MXFP4, attention sinks, a window in every other layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from worker.convert.config import Config
from worker.convert.family.dims import ATTENTION, Dims, with_experts
from worker.convert.family.rules import Array, Family, From, Make, transposed

_EXPERTS = "mlp.experts"


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
    return lambda sources, _d: np.ascontiguousarray(sources[0][..., first::2].T)


def _every_other_bias(first: int) -> Make:
    return lambda sources, _d: np.ascontiguousarray(sources[0][..., first::2])


def _forms(name: str, rows: slice, plain: Make) -> tuple[From, From]:
    """Experts as they are published, in MXFP4, or as transformers saves them."""
    source = f"{_EXPERTS}.{name}"
    return (
        From(
            f"{source}_blocks",
            also=(f"{source}_scales",),
            make=_mxfp4(rows),
            per_expert=True,
            kind="MXFP4",
        ),
        From(source, make=plain, per_expert=True),
    )


def _notes(config: Config) -> Iterator[str]:
    if config.rope().params.values.get("truncate") is False:
        yield "llama.cpp rounds the ends of YaRN's ramp to whole dimensions, the source does not"


GPT_OSS = Family(
    "gpt-oss",
    ("GptOssForCausalLM",),
    f"attn_norm {ATTENTION} attn_sinks post_attention_norm ffn_gate_inp+"
    " ffn_gate_exps+ ffn_up_exps+ ffn_down_exps+",
    sources={
        "ffn_gate_exps": _forms("gate_up_proj", slice(0, None, 2), _every_other(0)),
        "ffn_up_exps": _forms("gate_up_proj", slice(1, None, 2), _every_other(1)),
        "ffn_down_exps": _forms("down_proj", slice(None), transposed),
        "ffn_gate_exps.bias": From(f"{_EXPERTS}.gate_up_proj_bias", make=_every_other_bias(0)),
        "ffn_up_exps.bias": From(f"{_EXPERTS}.gate_up_proj_bias", make=_every_other_bias(1)),
        "ffn_down_exps.bias": f"{_EXPERTS}.down_proj_bias",
    },
    windows=2,
    dims=with_experts("num_local_experts", width="intermediate_size"),
    head="always",
    notes=_notes,
    requires={"hidden_act": "silu", "swiglu_limit": 7.0},
)
