"""EXAONE 4: norms after attention and feed-forward, and on every head of q and k."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config
from worker.errors import ModelError

_WINDOWED_LAYERS = 64
"""llama.cpp uses a sliding window exactly in models with this number of layers."""


def _exaone4(arch: str, config: Config, d: Dims) -> Metadata:
    return blocks.rms_metadata(arch, config, d) | blocks.windows(config, d, period=4)


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu")
    if config.has("sliding_window") != (d.n_layers == _WINDOWED_LAYERS):
        raise ModelError(
            f"{config.name}: sliding_window is {config.values.get('sliding_window')}, llama.cpp's "
            f"exaone4 has windows in models of {_WINDOWED_LAYERS} layers and in no others"
        )


EXAONE4 = Family(
    architecture="exaone4",
    names=("Exaone4ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.attention(biases=False),
        **blocks.head_norms(),
        **blocks.gated_mlp(),
        **blocks.norms(
            post_attention_layernorm="post_attention_norm",
            post_feedforward_layernorm="post_ffw_norm",
        ),
    },
    metadata=_exaone4,
    extra_tensors=blocks.llama3_factors,
    check=_check,
)

FAMILIES = (EXAONE4,)
