"""The metadata of a family, and the refusal of settings that llama.cpp does not implement."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.config import TRAINED, Config
from worker.convert.family.dims import Dims
from worker.convert.family.rules import Family, Metadata, Setting, Value
from worker.errors import ModelError


def of_family(family: Family, config: Config, d: Dims) -> Metadata:
    found = (family.common or decoder)(family, config, d)
    for key, setting in family.metadata.items():
        value = setting(config, d) if callable(setting) else setting
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value
    n_rotated = found.get(Keys.Rope.DIMENSION_COUNT, 0)
    length = found.get(Keys.Attention.KEY_LENGTH, d.head_dim)
    if isinstance(n_rotated, int) and isinstance(length, int) and n_rotated > length:
        what = f"{n_rotated} dimensions of a head would be rotated, but a head has {length}"
        raise ModelError(f"{config.name}: {what}")
    return found


def number(*keys: str, default: float | None = None) -> Setting:
    return lambda config, d: config.number(*keys, default=default)


def integer(*keys: str, default: int | None = None) -> Setting:
    return lambda config, d: config.integer(*keys, default=default)


def counted(key: str) -> Setting:
    return lambda config, d: config.count(key)


def flag(key: str, default: bool = False) -> Setting:
    return lambda config, d: config.flag(key, default=default)


def if_given(key: str) -> Callable[[Config, Dims], float | None]:
    """A number; `None` if the configuration lacks it."""
    return lambda config, d: config.number(key) if config.has(key) else None


def mrope_sections(config: Config) -> list[int]:
    """`mrope_section`: how many of a head's frequencies belong to each dimension of a position;
    empty if the configuration lacks it."""
    params = config.rope().params
    given = params.items("mrope_section") if params.has("mrope_section") else []
    if len(given) > 4 or not all(type(n) is int and 0 <= n < 1 << 15 for n in given):
        what = f"mrope_section must be up to four numbers of frequencies, not {given!r:.80}"
        raise ModelError(f"{params.name}: {what}")
    return given


def sections(default: Sequence[int] | None = None) -> Setting:
    """How a head's frequencies are divided among three dimensions, which are equal for a text."""

    def read(config: Config, d: Dims) -> Value:
        given = mrope_sections(config) or default or [d.head_dim // 2]
        return [*given, 0, 0, 0, 0][:4]

    return read


def of_dims(read: Callable[[Dims], Value | None]) -> Setting:
    return lambda config, d: read(d)


# --- what most families have ----------------------------------------------------------------


def sizes(d: Dims, n_positions: int) -> Metadata:
    return {
        Keys.LLM.BLOCK_COUNT: d.n_layers,
        Keys.LLM.CONTEXT_LENGTH: n_positions,
        Keys.LLM.EMBEDDING_LENGTH: d.n_embd,
        Keys.LLM.FEED_FORWARD_LENGTH: d.n_ff,
        Keys.Attention.HEAD_COUNT: d.n_head,
    }


def decoder(family: Family, config: Config, d: Dims) -> Metadata:
    """The metadata of a decoder with rotary positions; layers may have windows or experts."""
    is_whole = family.rotary is None and not family.metadata.get(Keys.Rope.DIMENSION_COUNT)
    n_rotated = rotated(config, d.head_dim, 1.0 if family.rotary is None else family.rotary)
    if is_whole and n_rotated != d.head_dim:
        raise ModelError(f"{config.name}: llama.cpp's {family.architecture} rotates whole heads")
    return {
        **sizes(d, config.integer("max_position_embeddings")),
        Keys.Attention.HEAD_COUNT_KV: d.n_head_kv,
        Keys.Attention.KEY_LENGTH: d.head_dim,
        Keys.Attention.VALUE_LENGTH: d.head_dim,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **({} if config.flag("is_causal", default=True) else {Keys.Attention.CAUSAL: False}),
        **rope(family, config, n_rotated),
        **norm_epsilon(family, config),
        **(windows(config, d, family.windows) if family.windows else {}),
        **(_experts(config, d, family.n_used) if d.n_expert else {}),
    }


def norm_epsilon(family: Family, config: Config) -> Metadata:
    keys = ("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
    if family.norm == "rms":
        return {Keys.Attention.LAYERNORM_RMS_EPS: config.number("rms_norm_eps")}
    if family.norm == "layer":
        return {Keys.Attention.LAYERNORM_EPS: config.number(*keys, default=1e-5)}
    return {}


def rotated(config: Config, head_dim: int, default: float) -> int:
    """The number of dimensions of a head that are rotated."""
    share = config.rope().params.number(
        "partial_rotary_factor",
        default=config.number("partial_rotary_factor", "rope_pct", "rotary_pct", default=default),
    )
    return int(share * head_dim)


def local_theta(key: str) -> Setting:
    """The `rope_theta` of the layers with a window; older configurations have it under `key`."""

    def read(config: Config, _d: Dims) -> float:
        local = config.section("rope_parameters").section("sliding_attention")
        return local.number("rope_theta", default=config.number(key, default=10000.0))

    return read


_WINDOWED = {"sliding_attention": True, "full_attention": False}


def windows(config: Config, d: Dims, period: int) -> Metadata:
    """The sliding window and the layers that have it; without `layer_types`, all but every
    `period`-th."""
    if not config.has("sliding_window") or config.values.get("sliding_window_pattern") == 1:
        return {}
    for key in ("_sliding_window_pattern", "sliding_window_pattern"):  # The latter has precedence.
        if isinstance(config.values.get(key), int):
            period = config.integer(key)
    layers = [(i + 1) % period != 0 for i in range(d.n_layers)]
    if config.has("layer_types"):
        kinds = [str(kind) for kind in config.items("layer_types")]
        layers = [_WINDOWED.get(kind, False) for kind in kinds]
        if not _WINDOWED.keys() >= set(kinds):
            raise ModelError(f"{config.name}: layer_types may only have {', '.join(_WINDOWED)}")
    return {
        Keys.Attention.SLIDING_WINDOW: config.integer("sliding_window"),
        Keys.Attention.SLIDING_WINDOW_PATTERN: layers,
    }


def _experts(config: Config, d: Dims, n_used: str) -> Metadata:
    return {
        Keys.LLM.EXPERT_COUNT: d.n_expert,
        Keys.LLM.EXPERT_USED_COUNT: config.integer(n_used),
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: d.n_ff_expert,
    }


SHARED_WIDTH: Mapping[str, Setting] = {
    Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: of_dims(lambda d: d.n_ff_shared or None)
}
"""For families in which llama.cpp reads the width of the shared experts."""


def as_deepseek(gating: int) -> Mapping[str, Setting]:
    """The metadata of experts as in DeepSeek; `gating` is 1 for softmax and 2 for sigmoid."""
    return {
        Keys.LLM.EXPERT_SHARED_COUNT: integer("n_shared_experts"),
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: of_dims(lambda d: d.kinds.count("dense")),
        Keys.LLM.EXPERT_GATING_FUNC: gating,
        Keys.LLM.EXPERT_WEIGHTS_SCALE: number("routed_scaling_factor", default=1.0),
        Keys.LLM.EXPERT_WEIGHTS_NORM: flag("norm_topk_prob"),
    }


def kv_heads(_config: Config, d: Dims) -> list[int]:
    """The number of KV heads of each layer; 0 for layers without attention."""
    return [d.n_head_kv if "attention" in kind.split() else 0 for kind in d.kinds]


# --- rotary positions -----------------------------------------------------------------------


def rope(family: Family, config: Config, n_dims: int) -> Metadata:
    """The rotation and its scaling; `check` refuses kinds that llama.cpp lacks."""
    rotation = config.rope()
    found: Metadata = {Keys.Rope.DIMENSION_COUNT: n_dims, Keys.Rope.FREQ_BASE: rotation.theta}
    if rotation.kind == "linear":
        found[Keys.Rope.SCALING_TYPE] = "linear"
        found[Keys.Rope.SCALING_FACTOR] = rotation.params.number("factor")
    elif rotation.kind == "yarn":
        found |= _yarn(family, config, rotation.params)
    return found


def _check_rope(family: Family, config: Config) -> None:
    """Refuse a kind of scaling that llama.cpp lacks in this family. Llama 3's is a tensor of
    factors; `mrope` scales nothing."""
    rotation = config.rope()
    is_idle = (  # It changes no position up to this length.
        rotation.kind == "dynamic"
        and not rotation.params.has("alpha")
        and rotation.params.integer(TRAINED) >= config.integer("max_position_embeddings")
    )
    usual = ("default", "linear", "yarn", "mrope", *["llama3"] * family.scales_as_llama3)
    known = family.ropes or (*usual, "dynamic up to max_position_embeddings")
    if rotation.kind not in known and (family.ropes or not is_idle):
        raise ModelError(
            f"{config.name}: rope scaling of type {rotation.kind!r} is not known for "
            f"{family.architecture} in llama.cpp; {', '.join(known)} are"
        )


def _yarn(family: Family, config: Config, params: Config) -> Metadata:
    """YaRN, as far as llama.cpp implements it.

    Its ramp goes from 32 rotations to 1 with ends rounded to whole dimensions. Its attention scale
    is 0.1 ln(factor) + 1, times `attn_factor`.
    """
    factor = params.number("factor")
    for key, value in family.yarn.items():
        if params.has(key) and params.values[key] != value:
            raise ModelError(
                f"{config.name}: YaRN's {key} must be {value} for llama.cpp's {family.architecture}"
            )
    found: Metadata = {
        Keys.Rope.SCALING_TYPE: "yarn",
        Keys.Rope.SCALING_FACTOR: factor,
        Keys.Rope.SCALING_ORIG_CTX_LEN: params.integer(TRAINED),
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
    rotation = config.rope()
    if rotation.kind != "llama3":
        return {}
    factor = rotation.params.number("factor")
    low = rotation.params.number("low_freq_factor")
    high = rotation.params.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"{config.name}: high_freq_factor must be greater than low_freq_factor")
    context = rotation.params.integer(TRAINED)
    exponents = np.arange(0, d.head_dim, 2, dtype=np.float32) / np.float32(d.head_dim)
    frequencies = np.float32(1) / np.float32(rotation.theta) ** exponents
    lengths = np.float32(2 * math.pi) / frequencies
    # The number of waves in the context that the model was first trained on; float32 throughout, as
    # in the models' own code.
    waves = np.float32(context) / lengths
    blend = (waves - np.float32(low)) / np.float32(high - low)
    with np.errstate(divide="ignore"):  # The blend is not used beyond its two ends.
        blended = np.float32(1) / ((np.float32(1) - blend) / np.float32(factor) + blend)
    factors = np.where(waves > high, np.float32(1), np.where(waves < low, factor, blended))
    return {"rope_freqs.weight": factors.astype(np.float32)}


# --- checks ---------------------------------------------------------------------------------


def require(config: Config, d: Dims, settings: Mapping[str, object]) -> None:
    """Refuse settings that llama.cpp does not implement.

    `settings` has the value that llama.cpp implements, a tuple of alternatives, or a function that
    computes either from the sizes. `null` and absence mean the first alternative.
    """
    for key, wanted in settings.items():
        wanted = wanted(d) if callable(wanted) else wanted
        allowed = wanted if isinstance(wanted, tuple) else (wanted,)
        value = config.values.get(key)
        value = allowed[0] if value is None else value
        if value not in allowed:
            choice = " or ".join(str(a) for a in allowed)
            what = f"{config.spelling(key)} is {value!r}; llama.cpp implements {choice}"
            raise ModelError(f"{config.name}: {what}")


def check(family: Family, config: Config, d: Dims) -> None:
    _check_rope(family, config)
    local = config.section("rope_parameters").section("sliding_attention")
    if local.text("rope_type", "default") != "default":
        raise ModelError(f"{local.name}: llama.cpp cannot scale the rotation within windows")
    require(config, d, family.requires)
    family.check(config, d)
