"""Parts that most families share: embeddings, attention, feed-forward blocks, metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.architectures.rules import Dims, Metadata, Rule, Rules, Shape
from worker.convert.config import Config
from worker.errors import ModelError

LAYER = "model.layers.{i}"
ATTENTION = f"{LAYER}.self_attn"
MLP = f"{LAYER}.mlp"


def vector(d: Dims) -> tuple[int, ...]:
    return (d.n_embd,)


def norm(target: str, *, plus: float = 0.0, bias: bool = False) -> Rule:
    return Rule(f"{target}.{'bias' if bias else 'weight'}", vector, plus=plus)


def embeddings(*, norm_plus: float = 0.0, norm_name: str = "norm") -> Rules:
    """Token embedding, final norm and the output head, which may be tied to the embedding."""
    return {
        "model.embed_tokens.weight": Rule("token_embd.weight", lambda d: (d.n_vocab, d.n_embd)),
        f"model.{norm_name}.weight": norm("output_norm", plus=norm_plus),
        "lm_head.weight": Rule("output.weight", lambda d: (d.n_vocab, d.n_embd), optional=True),
    }


def layer_norm(source: str, target: str, *, plus: float = 0.0) -> Rules:
    """A norm with a bias."""
    return {
        f"{source}.weight": norm(target, plus=plus),
        f"{source}.bias": norm(target, bias=True),
    }


def linear(source: str, target: str, shape: Shape, *, optional_bias: bool = False) -> Rules:
    """A projection with a bias."""
    return {
        f"{source}.weight": Rule(f"{target}.weight", shape),
        f"{source}.bias": Rule(f"{target}.bias", lambda d: shape(d)[:1], optional=optional_bias),
    }


def head_norms() -> Rules:
    """The norms that all heads of q, and all heads of k, share."""
    return {
        f"{ATTENTION}.{x}_norm.weight": Rule(
            f"blk.{{i}}.attn_{x}_norm.weight", lambda d: (d.head_dim,)
        )
        for x in "qk"
    }


def pre_norms() -> Rules:
    return {
        "model.layers.{i}.input_layernorm.weight": norm("blk.{i}.attn_norm"),
        "model.layers.{i}.post_attention_layernorm.weight": norm("blk.{i}.ffn_norm"),
    }


def attention(*, interleaved: bool = False, biases: bool = True, output: str = "o_proj") -> Rules:
    """Separate q, k, v and output projections; `biases` allows biases of q, k and v."""
    q_heads = (lambda d: d.n_head) if interleaved else None
    kv_heads = (lambda d: d.n_head_kv) if interleaved else None
    rules: dict[str, Rule] = {
        f"{ATTENTION}.q_proj.weight": Rule(
            "blk.{i}.attn_q.weight", lambda d: (d.q_rows, d.n_embd), interleaved_heads=q_heads
        ),
        f"{ATTENTION}.k_proj.weight": Rule(
            "blk.{i}.attn_k.weight", lambda d: (d.kv_rows, d.n_embd), interleaved_heads=kv_heads
        ),
        f"{ATTENTION}.v_proj.weight": Rule(
            "blk.{i}.attn_v.weight", lambda d: (d.kv_rows, d.n_embd)
        ),
        f"{ATTENTION}.{output}.weight": Rule(
            "blk.{i}.attn_output.weight", lambda d: (d.n_embd, d.q_rows)
        ),
    }
    if biases:
        rules |= {
            f"{ATTENTION}.q_proj.bias": Rule(
                "blk.{i}.attn_q.bias",
                lambda d: (d.q_rows,),
                optional=True,
                interleaved_heads=q_heads,
            ),
            f"{ATTENTION}.k_proj.bias": Rule(
                "blk.{i}.attn_k.bias",
                lambda d: (d.kv_rows,),
                optional=True,
                interleaved_heads=kv_heads,
            ),
            f"{ATTENTION}.v_proj.bias": Rule(
                "blk.{i}.attn_v.bias", lambda d: (d.kv_rows,), optional=True
            ),
            f"{ATTENTION}.{output}.bias": Rule("blk.{i}.attn_output.bias", vector, optional=True),
        }
    return rules


def gated_mlp(*, biases: bool = False) -> Rules:
    rules: dict[str, Rule] = {
        f"{MLP}.gate_proj.weight": Rule("blk.{i}.ffn_gate.weight", lambda d: (d.n_ff, d.n_embd)),
        f"{MLP}.up_proj.weight": Rule("blk.{i}.ffn_up.weight", lambda d: (d.n_ff, d.n_embd)),
        f"{MLP}.down_proj.weight": Rule("blk.{i}.ffn_down.weight", lambda d: (d.n_embd, d.n_ff)),
    }
    if biases:
        rules |= {
            f"{MLP}.gate_proj.bias": Rule(
                "blk.{i}.ffn_gate.bias", lambda d: (d.n_ff,), optional=True
            ),
            f"{MLP}.up_proj.bias": Rule("blk.{i}.ffn_up.bias", lambda d: (d.n_ff,), optional=True),
            f"{MLP}.down_proj.bias": Rule("blk.{i}.ffn_down.bias", vector, optional=True),
        }
    return rules


def common_metadata(arch: str, config: Config, d: Dims) -> Metadata:
    """The metadata keys of every family with rotary positions and RMS norms."""
    return {
        Keys.LLM.BLOCK_COUNT: d.n_layers,
        Keys.LLM.CONTEXT_LENGTH: config.integer("max_position_embeddings"),
        Keys.LLM.EMBEDDING_LENGTH: d.n_embd,
        Keys.LLM.FEED_FORWARD_LENGTH: d.n_ff,
        Keys.Attention.HEAD_COUNT: d.n_head,
        Keys.Attention.HEAD_COUNT_KV: d.n_head_kv,
        Keys.Attention.KEY_LENGTH: d.head_dim,
        Keys.Attention.VALUE_LENGTH: d.head_dim,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **rope_metadata(arch, config, d.head_dim),
    }


def require(config: Config, key: str, *allowed: object) -> None:
    """Refuse a setting that llama.cpp does not implement; `null` and absence mean the first of
    `allowed`."""
    value = config.values.get(key)
    value = allowed[0] if value is None else value
    if value not in allowed:
        choice = " or ".join(str(a) for a in allowed)
        raise ModelError(f"{config.name}: {key} is {value!r}, llama.cpp implements {choice}")


def require_default_rope(config: Config) -> None:
    if config.rope().kind != "default":
        raise ModelError(f"{config.name}: rope scaling is not known for this family in llama.cpp")


def require_silu(config: Config, d: Dims) -> None:
    require(config, "hidden_act", "silu")


def layer_norm_epsilon(config: Config, *keys: str, default: float = 1e-5) -> Metadata:
    keys = keys or ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
    return {Keys.Attention.LAYERNORM_EPS: config.number(*keys, default=default)}


def partial_rotary(config: Config, d: Dims, default: float) -> Metadata:
    """The number of dimensions of a head that are rotated."""
    factor = config.rope().params.number(
        "partial_rotary_factor",
        default=config.number("partial_rotary_factor", "rope_pct", "rotary_pct", default=default),
    )
    return {Keys.Rope.DIMENSION_COUNT: int(factor * d.head_dim)}


def windows(config: Config, d: Dims, period: int) -> Metadata:
    """The sliding window and the layers that have it; without `layer_types`, all but every
    `period`-th."""
    if not config.has("sliding_window"):
        return {}
    kinds = config.values.get("layer_types")
    layers = [(i + 1) % period != 0 for i in range(d.n_layers)]
    if kinds is not None:
        layers = [kind == "sliding_attention" for kind in config.items("layer_types")]
    return {
        Keys.Attention.SLIDING_WINDOW: config.integer("sliding_window"),
        Keys.Attention.SLIDING_WINDOW_PATTERN: layers,
    }


def rms_norm(config: Config) -> Metadata:
    epsilon = config.number("rms_norm_eps")
    return {Keys.Attention.LAYERNORM_RMS_EPS: epsilon}


def rope_metadata(
    arch: str, config: Config, n_dims: int, layers: str = "full_attention", theta: float = 10000.0
) -> Metadata:
    """Rotation and its scaling, of which llama.cpp's `arch` may know only some forms."""
    rope = config.rope(layers, theta)
    found: Metadata = {Keys.Rope.DIMENSION_COUNT: n_dims, Keys.Rope.FREQ_BASE: rope.theta}
    if rope.kind in ("default", "llama3"):
        return found  # Llama 3's scaling is a tensor of factors (`llama3_factors`).
    if rope.kind == "dynamic" and _is_idle(config, rope.params):
        return found
    if rope.kind == "linear":
        found[Keys.Rope.SCALING_TYPE] = "linear"
        found[Keys.Rope.SCALING_FACTOR] = rope.params.number("factor")
        return found
    if rope.kind == "yarn":
        return found | _yarn(arch, config, rope.params)
    raise ModelError(
        f"{config.name}: rope scaling of type {rope.kind!r} is not known for {arch}; "
        "default, linear, llama3 and yarn are, and dynamic up to max_position_embeddings"
    )


def _is_idle(config: Config, params: Config) -> bool:
    """Whether dynamic scaling leaves every position alone that the model is said to have."""
    n_positions = config.integer("max_position_embeddings")
    begins = params.integer("original_max_position_embeddings", default=n_positions)
    return begins >= n_positions and not params.has("alpha")


_READS_RAMP = ("mistral3",)
"""Families whose implementation reads YaRN's `beta_fast` and `beta_slow`."""


def _yarn(arch: str, config: Config, params: Config) -> Metadata:
    """YaRN, as far as llama.cpp implements it.

    Its ramp goes from 32 rotations to 1 with ends rounded to whole dimensions. Its attention scale
    is 0.1 ln(factor) + 1, times `attn_factor`.
    """
    factor = params.number("factor")
    usual: dict[str, object] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    if arch in _READS_RAMP:
        usual = {"truncate": True}
    elif arch == "gpt-oss":
        del usual["truncate"]  # It is rounded all the same there (see the family's notes).
    for key, value in usual.items():
        if params.has(key) and params.values[key] != value:
            raise ModelError(f"{config.name}: YaRN's {key} must be {value} for llama.cpp's {arch}")
    found: Metadata = {
        Keys.Rope.SCALING_TYPE: "yarn",
        Keys.Rope.SCALING_FACTOR: factor,
        Keys.Rope.SCALING_ORIG_CTX_LEN: params.integer(
            "original_max_position_embeddings", default=config.integer("max_position_embeddings")
        ),
    }
    attention = _yarn_attention(factor, params)
    if not math.isclose(attention, _mscale(factor, 1.0)):
        found[Keys.Rope.SCALING_ATTN_FACTOR] = attention / _mscale(factor, 1.0)
    return found


def _yarn_attention(factor: float, params: Config) -> float:
    """The factor by which transformers multiplies both q and k."""
    if params.has("attention_factor"):
        return params.number("attention_factor")
    if params.values.get("mscale") and params.values.get("mscale_all_dim"):
        return _mscale(factor, params.number("mscale")) / _mscale(
            factor, params.number("mscale_all_dim")
        )
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def llama3_factors(config: Config, d: Dims) -> Mapping[str, npt.NDArray[np.float32]]:
    """Llama 3.1's scaling: a tensor with one divisor for each rotary frequency.

    Short waves keep their frequency, long waves divide it by `factor`, and those in between get a
    blend of both.
    """
    rope = config.rope()
    if rope.kind != "llama3":
        return {}
    factor = rope.params.number("factor")
    low = rope.params.number("low_freq_factor")
    high = rope.params.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"{config.name}: high_freq_factor must be greater than low_freq_factor")
    context = rope.params.integer("original_max_position_embeddings")
    exponents = np.arange(0, d.head_dim, 2, dtype=np.float32) / np.float32(d.head_dim)
    frequencies = np.float32(1) / np.float32(rope.theta) ** exponents
    lengths = np.float32(2 * math.pi) / frequencies
    # The number of waves in the context that the model was first trained on; float32 throughout, as
    # in the models' own code.
    waves = np.float32(context) / lengths
    blend = (waves - np.float32(low)) / np.float32(high - low)
    with np.errstate(divide="ignore"):  # The blend is not used beyond its two ends.
        blended = np.float32(1) / ((np.float32(1) - blend) / np.float32(factor) + blend)
    factors = np.where(waves > high, np.float32(1), np.where(waves < low, factor, blended))
    return {"rope_freqs.weight": factors.astype(np.float32)}
