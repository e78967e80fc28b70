"""Mamba 2 alone."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family import state_space
from worker.convert.family.metadata import NO_LIMIT, sizes
from worker.convert.family.rules import Family, Metadata
from worker.convert.family.sizes import Dims


def _dims(config: Config) -> Dims:
    d = Dims(
        n_layers=config.integer("num_hidden_layers"),
        n_embd=config.integer("hidden_size"),
        n_vocab=config.integer("vocab_size"),
        n_ff=0,
        n_head=0,
        n_head_kv=0,
        head_dim=0,
    )
    return state_space.with_sizes(d, config, config.integer("num_heads"))


def _metadata(_family: Family, config: Config, d: Dims) -> Metadata:
    return {
        **sizes(d, NO_LIMIT),
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        Keys.Attention.LAYERNORM_RMS_EPS: config.number("layer_norm_epsilon"),
    }


MAMBA2 = Family(
    "mamba2",
    ("Mamba2ForCausalLM",),
    f"attn_norm {state_space.MAMBA2}",
    layer="backbone.layers.{i}",
    sources=state_space.sources("mixer"),
    common=_metadata,
    metadata=state_space.METADATA,
    dims=_dims,
    roots=("backbone.", "model.backbone."),
    requires={"hidden_act": "silu", "use_bias": False, "use_conv_bias": True},
)
