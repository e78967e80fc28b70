"""Sampling parameters; one that is absent has the model file's default, else llama.cpp's.

For all dialects but the native one, which has the contract's defaults. Pure functions.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import lru_cache

from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState, ServedModel
from worker.wire.work import Sampling

MAX_SEED = 2**64 - 1

_DEFAULTS = {
    "temperature": ("general.sampling.temp", 0.8),
    "top_k": ("general.sampling.top_k", 40),
    "top_p": ("general.sampling.top_p", 0.95),
    "min_p": ("general.sampling.min_p", 0.05),
    "repetition_penalty": ("general.sampling.penalty_repeat", 1.0),
}
"""The file's key, else llama.cpp's value: at temperature 1, small models write nonsense."""


def sampling_of(
    state: AppState,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    logit_bias: Mapping[str, float] | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> Sampling:
    """A seed that is absent or -1 is drawn; a `top_k` below 1 is off.

    Raises:
        InvalidRequest: `logit_bias` has a key that is no token's id.
    """
    model, drawn = state.served, seed is None or seed == -1
    default, vocab_size = defaults_of(model), model.vocab_size
    return Sampling(
        seed=secrets.randbits(64) if drawn else (seed or 0) & MAX_SEED,
        temperature=default["temperature"] if temperature is None else temperature,
        top_p=default["top_p"] if top_p is None else top_p,
        top_k=min(
            max(int(default["top_k"] if top_k is None else top_k), 0), state.served.vocab_size
        ),
        min_p=default["min_p"] if min_p is None else min_p,
        repetition_penalty=(
            default["repetition_penalty"] if repetition_penalty is None else repetition_penalty
        ),
        frequency_penalty=frequency_penalty or 0.0,
        presence_penalty=presence_penalty or 0.0,
        logit_bias=_bias(logit_bias, vocab_size) if logit_bias else (),
        logprobs=logprobs,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
    )


@lru_cache(maxsize=1)
def defaults_of(model: ServedModel) -> Mapping[str, float]:
    found = model.metadata
    return {name: float(found.get(key, default)) for name, (key, default) in _DEFAULTS.items()}


def _bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for token in given:
        known = token.isascii() and token.isdigit() and len(token) < 12 and int(token) < vocab_size
        if not known:
            message = f"the keys of logit_bias must be token ids from 0 to {vocab_size - 1}"
            raise invalid([fault("logit_bias", "propertyNames", message)])
    return tuple((int(token), added) for token, added in given.items())
