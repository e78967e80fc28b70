"""RWKV 7, as flash-linear-attention names its tensors: a state per head and no attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.metadata import NO_LIMIT, layer_norm, of_dims, sizes
from worker.convert.family.rules import Array, Family, From, Metadata, Setting, Sources
from worker.convert.family.sizes import EMBD, FF, ONE, Dims, fixed, size
from worker.errors import ModelError

_ARCH = "rwkv7"
_INPUTS = "rwkvag"
"""What a token is mixed into with the one before it, in llama.cpp's order."""
_GROUP_NORM_EPS = 64e-5
_RANKS = {
    "w": ("decay_low_rank_dim", Keys.Attention.DECAY_LORA_RANK),
    "a": ("a_low_rank_dim", Keys.Attention.ICLR_LORA_RANK),
    "v": ("v_low_rank_dim", Keys.Attention.VALUE_RESIDUAL_MIX_LORA_RANK),
    "g": ("gate_low_rank_dim", Keys.Attention.GATE_LORA_RANK),
}
"""The inputs that are products of two small matrices, with the names of their inner size."""


def _dims(config: Config) -> Dims:
    n_layers, n_embd = config.integer("num_hidden_layers"), config.integer("hidden_size")
    head_dim = config.integer("head_dim", "head_size", default=64)
    ratio = config.number("hidden_ratio", default=4.0)
    return Dims(
        n_layers=n_layers,
        n_embd=n_embd,
        n_vocab=config.integer("vocab_size"),
        n_ff=config.integer("intermediate_size", default=int(n_embd * ratio)),
        n_head=n_embd // head_dim,
        n_head_kv=0,
        head_dim=head_dim,
        kinds=("first", *["later"] * (n_layers - 1)),
        more={x: config.integer(key) for x, (key, _) in _RANKS.items()},
    )


def _metadata(_family: Family, config: Config, d: Dims) -> Metadata:
    return {
        **sizes(d, NO_LIMIT),
        Keys.Attention.HEAD_COUNT: 0,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        Keys.WKV.HEAD_SIZE: d.head_dim,
        **layer_norm(config),
    }


def _rank(x: str) -> Setting:
    return of_dims(lambda d: d.more[x])


def _check(config: Config, d: Dims) -> None:
    widths = config.values.get("value_dim")
    for width in widths if isinstance(widths, list) else [widths]:
        if width not in (None, d.n_embd):
            raise ModelError(
                f"{config.name}: value_dim is {width}, llama.cpp's {_ARCH} wants hidden_size"
            )
    epsilon = d.head_dim * config.number("norm_eps", default=1e-5)
    if not np.isclose(epsilon, _GROUP_NORM_EPS):
        raise ModelError(
            f"{config.name}: head_dim times norm_eps is {epsilon:g}, llama.cpp has "
            f"{_GROUP_NORM_EPS:g} in the norm of the heads"
        )


def _stacked(sources: Sequence[Array], _d: Dims) -> Array:
    return np.concatenate([source.reshape(1, -1) for source in sources])


def _flat(sources: Sequence[Array], _d: Dims) -> Array:
    """Some checkpoints store a vector with dimensions of one."""
    return sources[0].reshape(-1)


_LOW_RANK = [*((x, f"time_mix_{x}") for x in _RANKS), ("a", "first:time_mix_v")]
"""The first layer has no value of an earlier one: llama.cpp wants tensors there that it never
reads, and is given those of `a`, as its own script does."""

_SOURCES: Sources = {
    "token_embd": "model.embeddings",
    "token_embd_norm": "model.layers.0.pre_norm",
    "output_norm": "model.norm",
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_ln": "attn.g_norm",
    # The factors that mix a token with the one before it are one tensor, or one for each input.
    "time_mix_lerp_fused": (
        From(
            f"attn.x_{_INPUTS[0]}",
            also=tuple(f"attn.x_{x}" for x in _INPUTS[1:]),
            make=_stacked,
        ),
        From("attn.x_x", make=_flat),
    ),
    "time_mix_k_k": From("attn.k_k", make=_flat),
    "time_mix_k_a": From("attn.k_a", make=_flat),
    "time_mix_r_k": From("attn.r_k", make=_flat),
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "channel_mix_lerp_k": From("ffn.x_k", make=_flat),
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
    **{f"{name}0": From(f"attn.{x}_lora.lora.2.bias") for x, name in _LOW_RANK},
    **{f"{name}1": From(f"attn.{x}_lora.lora.0.weight") for x, name in _LOW_RANK},
    **{f"{name}2": From(f"attn.{x}_lora.lora.2.weight") for x, name in _LOW_RANK},
}

RWKV7 = Family(
    _ARCH,
    ("RWKV7ForCausalLM",),
    {
        "": "attn_norm+ attn_norm_2+ time_mix_ln+ time_mix_lerp_fused time_mix_k_k time_mix_k_a"
        " time_mix_r_k time_mix_receptance time_mix_key time_mix_value time_mix_output"
        " channel_mix_lerp_k channel_mix_key channel_mix_value time_mix_w0 time_mix_w1 time_mix_w2"
        " time_mix_a0 time_mix_a1 time_mix_a2 time_mix_g1 time_mix_g2",
        "later": "time_mix_v0 time_mix_v1 time_mix_v2",
        "first": "time_mix_v0 time_mix_v1 time_mix_v2",
    },
    model="token_embd token_embd_norm+ output_norm+ output?",
    sources=_SOURCES,
    shapes={
        "time_mix_ln": (EMBD,),
        "time_mix_lerp_fused": (fixed(len(_INPUTS)), ONE, ONE, EMBD),
        "time_mix_k_k": (EMBD,),
        "time_mix_k_a": (EMBD,),
        "time_mix_r_k": (EMBD,),
        "time_mix_receptance": (EMBD, EMBD),
        "time_mix_key": (EMBD, EMBD),
        "time_mix_value": (EMBD, EMBD),
        "time_mix_output": (EMBD, EMBD),
        "channel_mix_lerp_k": (EMBD,),
        "channel_mix_key": (FF, EMBD),
        "channel_mix_value": (EMBD, FF),
        **{f"{name}0": (EMBD,) for _, name in _LOW_RANK},
        **{f"{name}1": (size(x), EMBD) for x, name in _LOW_RANK},
        **{f"{name}2": (EMBD, size(x)) for x, name in _LOW_RANK},
    },
    common=_metadata,
    metadata={key: _rank(x) for x, (_, key) in _RANKS.items()},
    dims=_dims,
    head="always",
    ignored=(r"model\.layers\.0\.attn\.v_lora\..*",),
    requires={"hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "attn": None},
    check=_check,
)
