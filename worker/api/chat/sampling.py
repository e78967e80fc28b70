"""Sampling parameters; a field that is absent has the model file's default, else llama.cpp's.

For OpenAI's and the other dialects; the native routes have the contract's defaults. Pure functions.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from worker.api.dialects.openai.schema import SamplingFields
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.wire.work import Constraint, Sampling

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
    body: SamplingFields,
    state: AppState,
    *,
    constraint: Constraint | None = None,
    logprobs: int | None = None,
) -> Sampling:
    drawn = body.seed is None or body.seed == -1
    defaults = defaults_of(state)

    def given(name: str) -> float:
        value = getattr(body, name)
        return float(defaults[name] if value is None else value)

    return Sampling(
        seed=secrets.randbits(64) if drawn else (body.seed or 0) & MAX_SEED,
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=min(max(int(given("top_k")), 0), state.vocab_size),
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        logit_bias=_bias(body.logit_bias, state.vocab_size),
        constraint=constraint,
        logprobs=logprobs,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
    )


def defaults_of(state: AppState) -> dict[str, float]:
    found = state.metadata
    return {name: float(found.get(key, default)) for name, (key, default) in _DEFAULTS.items()}


def _bias(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    for token in given:
        known = token.isascii() and token.isdigit() and len(token) < 12 and int(token) < vocab_size
        if not known:
            message = f"the keys of logit_bias must be token ids from 0 to {vocab_size - 1}"
            raise invalid([fault("logit_bias", "propertyNames", message)])
    return tuple((int(token), added) for token, added in given.items())
