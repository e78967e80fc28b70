"""EXAONE 4: norms after attention and feed-forward, and on every head of q and k."""

from __future__ import annotations

from worker.convert.config import Config
from worker.convert.family.layers import GATED, HEAD_NORMS
from worker.convert.family.metadata import llama3_factors
from worker.convert.family.rules import Family
from worker.convert.family.sizes import Dims
from worker.errors import ModelError

_WINDOWED_LAYERS = 64
"""llama.cpp uses a sliding window exactly in models with this number of layers."""


def _check(config: Config, d: Dims) -> None:
    if config.has("sliding_window") != (d.n_layers == _WINDOWED_LAYERS):
        raise ModelError(
            f"{config.name}: sliding_window is {config.values.get('sliding_window')}, llama.cpp's "
            f"exaone4 has windows in models of {_WINDOWED_LAYERS} layers and in no others"
        )


EXAONE4 = Family(
    "exaone4",
    ("Exaone4ForCausalLM",),
    f"attn_q attn_k attn_v attn_output {HEAD_NORMS} {GATED} post_attention_norm post_ffw_norm",
    windows=4,
    scales_as_llama3=True,
    extra_tensors=llama3_factors,
    check=_check,
)
