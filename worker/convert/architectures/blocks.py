"""Parts that most families share: embeddings, attention, feed-forward blocks, metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.architectures import shapes
from worker.convert.architectures.rules import Dims, Make, Metadata, Rule, Rules, Shape
from worker.convert.config import Config
from worker.errors import ModelError

LAYER = "model.layers.{i}"
ATTENTION = f"{LAYER}.self_attn"
MLP = f"{LAYER}.mlp"
GATED = ("gate_proj", "up_proj", "down_proj")
"""The usual names of a gated feed-forward block's matrices."""


def weights(
    prefix: str,
    parts: Mapping[str, tuple[str, Shape]],
    *,
    optional: bool = False,
    keep_f32: bool = False,
    biases: bool = False,
    interleaved: Container[str] = (),
) -> Rules:
    """Weights of a layer; `parts` has the name in the GGUF and the shape by the name behind
    `prefix`.

    `biases` allows a bias beside each; the rotary heads of those in `interleaved` are interleaved.
    """
    return {
        f"{prefix}.{source}.{kind}": Rule(
            f"blk.{{i}}.{target}.{kind}",
            shape if kind == "weight" else shapes.rows_of(shape),
            optional=optional or kind == "bias",
            keep_f32=keep_f32,
            interleaved=source in interleaved,
        )
        for kind in (("weight", "bias") if biases else ("weight",))
        for source, (target, shape) in parts.items()
    }


def norm(target: str, *, plus: float = 0.0, bias: bool = False, optional: bool = False) -> Rule:
    return Rule(f"{target}.{'bias' if bias else 'weight'}", shapes.vector, optional, plus=plus)


def norms(*, plus: float = 0.0, **targets: str) -> Rules:
    """Norms of a layer; `targets` has their names in the GGUF by those in the checkpoint."""
    return {
        f"{LAYER}.{source}.weight": norm(f"blk.{{i}}.{target}", plus=plus)
        for source, target in targets.items()
    }


def pre_norms(plus: float = 0.0) -> Rules:
    return norms(plus=plus, input_layernorm="attn_norm", post_attention_layernorm="ffn_norm")


def layer_norm(source: str, target: str, *, plus: float = 0.0, optional: bool = False) -> Rules:
    """A norm with a bias."""
    return {
        f"{source}.weight": norm(target, plus=plus, optional=optional),
        f"{source}.bias": norm(target, bias=True, optional=optional),
    }


def head_norms(name: str = "norm", *, plus: float = 0.0, optional: bool = False) -> Rules:
    """The norms that all heads of q, and all heads of k, share."""
    return {
        f"{ATTENTION}.{x}_{name}.weight": Rule(
            f"blk.{{i}}.attn_{x}_norm.weight", lambda d: (d.head_dim,), optional, plus=plus
        )
        for x in "qk"
    }


def norm_per_head(q: str, k: str) -> Rules:
    """The norms of models that have one for each head."""
    parts: dict[str, tuple[str, Shape]] = {
        q: ("attn_q_norm", lambda d: (d.n_head, d.head_dim)),
        k: ("attn_k_norm", lambda d: (d.n_head_kv, d.head_dim)),
    }
    return weights(ATTENTION, parts, optional=True, keep_f32=True)


def embeddings(
    token: str = "model.embed_tokens", last_norm: str = "model.norm", *, norm_plus: float = 0.0
) -> Rules:
    """Token embedding, final norm and the output head, which may be tied to the embedding."""
    return {
        f"{token}.weight": Rule("token_embd.weight", shapes.by_token),
        f"{last_norm}.weight": norm("output_norm", plus=norm_plus),
        "lm_head.weight": Rule("output.weight", shapes.by_token, optional=True),
    }


def linear(source: str, target: str, shape: Shape, *, make: Make | None = None) -> Rules:
    """A projection with a bias."""
    return {
        f"{source}.weight": Rule(f"{target}.weight", shape, make=make),
        f"{source}.bias": Rule(f"{target}.bias", shapes.rows_of(shape)),
    }


def attention(
    prefix: str = ATTENTION,
    *,
    interleaved: bool = False,
    biases: bool = True,
    output: str = "o_proj",
) -> Rules:
    """Separate q, k, v and output projections; `biases` allows a bias of each."""
    parts: dict[str, tuple[str, Shape]] = {
        "q_proj": ("attn_q", lambda d: (d.q_rows, d.n_embd)),
        "k_proj": ("attn_k", lambda d: (d.kv_rows, d.n_embd)),
        "v_proj": ("attn_v", lambda d: (d.kv_rows, d.n_embd)),
        output: ("attn_output", lambda d: (d.n_embd, d.q_rows)),
    }
    rotary = ("q_proj", "k_proj") if interleaved else ()
    return weights(prefix, parts, biases=biases, interleaved=rotary)


def gated_mlp(
    prefix: str = MLP, names: tuple[str, str, str] = GATED, *, biases: bool = False
) -> Rules:
    targets = (("ffn_gate", shapes.up), ("ffn_up", shapes.up), ("ffn_down", shapes.down))
    return weights(prefix, dict(zip(names, targets, strict=True)), biases=biases)


def mlp(prefix: str = MLP) -> Rules:
    """A feed-forward block without a gate."""
    return weights(
        prefix, {"up_proj": ("ffn_up", shapes.up), "down_proj": ("ffn_down", shapes.down)}
    )


def fused_mlp() -> Rules:
    """Gate and up in one tensor, which is what llama.cpp reads in these families."""
    parts = {"gate_up_proj": ("ffn_up", shapes.gate_and_up), "down_proj": ("ffn_down", shapes.down)}
    return weights(MLP, parts)


def sizes(d: Dims, n_positions: int) -> Metadata:
    """The metadata keys of every family."""
    return {
        Keys.LLM.BLOCK_COUNT: d.n_layers,
        Keys.LLM.CONTEXT_LENGTH: n_positions,
        Keys.LLM.EMBEDDING_LENGTH: d.n_embd,
        Keys.LLM.FEED_FORWARD_LENGTH: d.n_ff,
        Keys.Attention.HEAD_COUNT: d.n_head,
    }


def common_metadata(arch: str, config: Config, d: Dims) -> Metadata:
    """The metadata keys of every family with rotary positions."""
    return {
        **sizes(d, config.integer("max_position_embeddings")),
        Keys.Attention.HEAD_COUNT_KV: d.n_head_kv,
        Keys.Attention.KEY_LENGTH: d.head_dim,
        Keys.Attention.VALUE_LENGTH: d.head_dim,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **rope_metadata(arch, config, d.head_dim),
    }


def rms_metadata(arch: str, config: Config, d: Dims) -> Metadata:
    """The metadata keys of every family with rotary positions and RMS norms."""
    return common_metadata(arch, config, d) | rms_norm(config)


def require(config: Config, **settings: object) -> None:
    """Refuse settings that llama.cpp does not implement.

    Alternatives are a tuple; `null` and absence mean the first of them.
    """
    for key, wanted in settings.items():
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        value = config.values.get(key)
        value = allowed[0] if value is None else value
        if value not in allowed:
            choice = " or ".join(str(a) for a in allowed)
            raise ModelError(f"{config.name}: {key} is {value!r}, llama.cpp implements {choice}")


def requires(**settings: object) -> Callable[[Config, Dims], None]:
    """A check of these settings (see `require`)."""
    return lambda config, d: require(config, **settings)


def require_default_rope(config: Config) -> None:
    if config.rope().kind != "default":
        raise ModelError(f"{config.name}: rope scaling is not known for this family in llama.cpp")


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
    layers = [(i + 1) % period != 0 for i in range(d.n_layers)]
    if config.has("layer_types"):
        layers = [kind == "sliding_attention" for kind in config.items("layer_types")]
    return {
        Keys.Attention.SLIDING_WINDOW: config.integer("sliding_window"),
        Keys.Attention.SLIDING_WINDOW_PATTERN: layers,
    }


def rms_norm(config: Config) -> Metadata:
    return {Keys.Attention.LAYERNORM_RMS_EPS: config.number("rms_norm_eps")}


def rope_metadata(arch: str, config: Config, n_dims: int, theta: float = 10000.0) -> Metadata:
    """Rotation and its scaling, of which llama.cpp's `arch` may know only some forms."""
    rope = config.rope(default_theta=theta)
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


def _yarn(arch: str, config: Config, params: Config) -> Metadata:
    """YaRN, as far as llama.cpp implements it.

    Its ramp goes from 32 rotations to 1 with ends rounded to whole dimensions. Its attention scale
    is 0.1 ln(factor) + 1, times `attn_factor`.
    """
    factor = params.number("factor")
    usual: dict[str, object] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    if arch == "mistral3":
        usual = {"truncate": True}  # It reads the others.
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
