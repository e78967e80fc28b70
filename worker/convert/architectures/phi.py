"""Phi-3 and Phi-4, whose q/k/v and gate/up are fused in the form that llama.cpp reads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.config import MOST, TRAINED, Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import counted, rotated
from worker.convert.family.rules import Family
from worker.errors import ModelError


def _is_long(config: Config) -> bool:
    return config.rope().kind in ("longrope", "su")


def _attention_factor(config: Config, _d: Dims) -> float | None:
    if not _is_long(config):
        return None
    params = config.rope().params
    original = params.integer(TRAINED)
    if params.has("attention_factor"):
        return params.number("attention_factor")
    scale = config.integer("max_position_embeddings") / original
    return math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0


def _check_scale(config: Config) -> None:
    """Refuse a `factor` other than the ratio of the contexts: releases of transformers differ in
    which of the two they use."""
    params = config.rope().params
    scale = config.integer("max_position_embeddings") / params.integer(TRAINED)
    factor = params.number("factor", default=scale)
    if not params.has("attention_factor") and not math.isclose(factor, scale):
        raise ModelError(f"{params.name}: factor is {factor}, but the contexts' ratio is {scale}")


def _factors(config: Config, d: Dims) -> Mapping[str, npt.NDArray[np.float32]]:
    """Divisors of the rotary frequencies: `short` within the original context, `long` beyond it."""
    if not _is_long(config):
        return {}
    found = {}
    for name in ("long", "short"):
        factors = config.rope().params.items(f"{name}_factor")
        wanted = rotated(config, d.head_dim, 1.0) // 2
        are_sound = all(type(n) in (int, float) and 0 < n < MOST for n in factors)
        if len(factors) != wanted or not are_sound:
            raise ModelError(
                f"{config.name}: {name}_factor must have {wanted} numbers above 0, one per rotary "
                f"frequency; it has {len(factors)}"
            )
        found[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    _check_scale(config)
    return found


PHI3 = Family(
    "phi3",
    ("Phi3ForCausalLM",),
    rotary=1.0,
    metadata={
        Keys.Attention.KEY_LENGTH: None,
        Keys.Attention.VALUE_LENGTH: None,
        Keys.Rope.SCALING_ORIG_CTX_LEN: lambda config, d: config.rope().params.integer(TRAINED),
        Keys.Rope.SCALING_ATTN_FACTOR: _attention_factor,
        Keys.Attention.SLIDING_WINDOW: counted("sliding_window"),
    },
    ignores_window=True,
    extra_tensors=_factors,
    ropes=("default", "longrope", "su"),
    needs="attn_qkv",
)
