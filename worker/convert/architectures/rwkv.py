"""RWKV 7, as flash-linear-attention names its tensors: a state per head and no attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures import blocks, shapes
from worker.convert.architectures.rules import Array, Dims, Family, Metadata, Rule, Rules, Shape
from worker.convert.architectures.state_space import as_stored
from worker.convert.config import Config
from worker.errors import ModelError

_ARCH = "rwkv7"
_TIME_MIX = f"{blocks.LAYER}.attn"
_CHANNEL_MIX = f"{blocks.LAYER}.ffn"
_INPUTS = "rwkvag"
"""What a token is mixed into with the one before it, in llama.cpp's order."""
_GROUP_NORM_EPS = 64e-5
_RANKS = {
    "w": Keys.Attention.DECAY_LORA_RANK,
    "a": Keys.Attention.ICLR_LORA_RANK,
    "v": Keys.Attention.VALUE_RESIDUAL_MIX_LORA_RANK,
    "g": Keys.Attention.GATE_LORA_RANK,
}
"""The inputs that are products of two small matrices, with the keys of their inner size."""
_RANK_KEYS = {"w": "decay_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim"}
_RANK_KEYS |= {"g": "gate_low_rank_dim"}


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
        more={x: config.integer(key) for x, key in _RANK_KEYS.items()},
    )


def _metadata(_arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.sizes(d, n_positions=1 << 20),  # It has no bound.
        Keys.Attention.HEAD_COUNT: 0,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        Keys.WKV.HEAD_SIZE: d.head_dim,
        **blocks.layer_norm_epsilon(config),
        **{key: d.more[x] for x, key in _RANKS.items()},
    }


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="sqrelu", norm_first=True, norm_bias=True, attn=None)
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


def _vector(target: str) -> Rule:
    """A vector that some checkpoints store with dimensions of one."""
    return Rule(target, shapes.vector, make=as_stored)


def _lerp(*, is_fused: bool) -> Rules:
    """The factors that mix a token with the one before it: in the checkpoint fused, or one tensor
    for each input."""

    def shape(d: Dims) -> tuple[int, ...]:
        return (len(_INPUTS), 1, 1, d.n_embd)

    target = "blk.{i}.time_mix_lerp_fused.weight"
    if is_fused:
        return {f"{_TIME_MIX}.x_x": Rule(target, shape, make=as_stored, keep_f32=True)}
    first, *others = (f"{_TIME_MIX}.x_{x}" for x in _INPUTS)
    return {first: Rule(target, shape, make=_stacked, also=tuple(others), keep_f32=True)}


def _low_rank(x: str, *, layers: str = "", stands_for: str = "") -> dict[str, Rule]:
    """The matrices that make input `x`; `stands_for` is another input, whose names they get."""

    def inner(d: Dims) -> tuple[int, ...]:
        return (d.more[x], d.n_embd)

    def outer(d: Dims) -> tuple[int, ...]:
        return (d.n_embd, d.more[x])

    name, keeps = stands_for or x, x == "w"
    parts: dict[str, tuple[int, Shape]] = {
        "lora.0.weight": (1, inner),
        "lora.2.weight": (2, outer),
        "lora.2.bias": (0, shapes.vector),
    }
    return {
        f"{_TIME_MIX}.{x}_lora.{source}": Rule(
            f"blk.{{i}}.time_mix_{name}{number}.weight", shape, keep_f32=keeps, on=layers
        )
        for source, (number, shape) in parts.items()
        if not (x == "g" and number == 0)
    }


def _low_ranks() -> Rules:
    """The first layer has no value of an earlier one: llama.cpp wants tensors there that it never
    reads, and is given those of `a`, as its own script does."""
    unread = _low_rank("a", layers="first", stands_for="v")
    return {
        **_low_rank("w"),
        **{source: (rule, unread[source]) for source, rule in _low_rank("a").items()},
        **_low_rank("v", layers="later"),
        **_low_rank("g"),
    }


def _matrices() -> Rules:
    time = {
        "r_proj": ("time_mix_receptance", shapes.square),
        "k_proj": ("time_mix_key", shapes.square),
        "v_proj": ("time_mix_value", shapes.square),
        "o_proj": ("time_mix_output", shapes.square),
    }
    channel = {
        "key": ("channel_mix_key", shapes.up),
        "value": ("channel_mix_value", shapes.down),
    }
    return {**blocks.weights(_TIME_MIX, time), **blocks.weights(_CHANNEL_MIX, channel)}


RWKV7 = Family(
    architecture=_ARCH,
    names=("RWKV7ForCausalLM",),
    rules={
        "model.embeddings.weight": Rule("token_embd.weight", shapes.by_token),
        **blocks.layer_norm("model.layers.0.pre_norm", "token_embd_norm"),
        **blocks.layer_norm("model.norm", "output_norm"),
        "lm_head.weight": Rule("output.weight", shapes.by_token, optional=True),
        **blocks.layer_norm(f"{blocks.LAYER}.attn_norm", "blk.{i}.attn_norm"),
        **blocks.layer_norm(f"{blocks.LAYER}.ffn_norm", "blk.{i}.attn_norm_2"),
        **blocks.layer_norm(f"{_TIME_MIX}.g_norm", "blk.{i}.time_mix_ln"),
        **_lerp(is_fused=False),
        **_lerp(is_fused=True),
        **{f"{_TIME_MIX}.{x}": _vector(f"blk.{{i}}.time_mix_{x}.weight") for x in ("k_k", "k_a")},
        f"{_TIME_MIX}.r_k": _vector("blk.{i}.time_mix_r_k.weight"),
        f"{_CHANNEL_MIX}.x_k": _vector("blk.{i}.channel_mix_lerp_k.weight"),
        **_matrices(),
        **_low_ranks(),
    },
    metadata=_metadata,
    dims=_dims,
    head="always",
    ignored=(r"model\.layers\.0\.attn\.v_lora\..*",),
    check=_check,
)

FAMILIES = (RWKV7,)
