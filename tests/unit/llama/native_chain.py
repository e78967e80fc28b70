"""llama.cpp's own samplers over a row of logits, chained as in its server."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.llama import library
from worker.wire.sampling import Sampling

Row = npt.NDArray[np.float32]
FORBIDDEN = np.float32(-np.inf)


def row(n_vocab: int, spread: float = 2.5, seed: int = 0) -> Row:
    """A row of finite logits."""
    return (np.random.default_rng(seed).standard_normal(n_vocab) * spread).astype(np.float32)


@contextmanager
def native_chain(
    sampling: Sampling,
    produced: Sequence[int],
    n_vocab: int,
    vocab: Any = None,
    *,
    without_xtc: bool = False,
    picks: bool = False,
) -> Iterator[Any]:
    """A chain that has accepted the text; `picks` adds the final sampler, which chooses a token."""
    flat: Any = library.load()
    chain = flat.llama_sampler_chain_init(flat.llama_sampler_chain_default_params())
    for sampler in _samplers(flat, sampling, n_vocab, vocab, without_xtc, picks):
        flat.llama_sampler_chain_add(chain, sampler)
    for token in produced:
        flat.llama_sampler_accept(chain, token)
    yield chain
    flat.llama_sampler_free(chain)


def _samplers(
    flat: Any, s: Sampling, n_vocab: int, vocab: Any, without_xtc: bool, picks: bool
) -> Iterator[Any]:
    if s.logit_bias:
        pairs = (flat.llama_logit_bias * len(s.logit_bias))()
        for pair, (token, bias) in zip(pairs, s.logit_bias, strict=True):
            pair.token, pair.bias = token, bias
        yield flat.llama_sampler_init_logit_bias(n_vocab, len(pairs), pairs)
    if s.mirostat:
        yield flat.llama_sampler_init_temp(s.temperature)
        if picks and s.mirostat == 1:
            tau, eta = s.mirostat_tau, s.mirostat_eta
            yield flat.llama_sampler_init_mirostat(n_vocab, s.seed, tau, eta, 100)
        elif picks:
            yield flat.llama_sampler_init_mirostat_v2(s.seed, s.mirostat_tau, s.mirostat_eta)
        return
    for name in s.samplers:
        match name:
            case "penalties":
                parts = s.repetition_penalty, s.frequency_penalty, s.presence_penalty
                last_n = s.repeat_last_n or 0
                yield flat.llama_sampler_init_penalties(n_vocab, last_n, *parts)
            case "dry":
                texts = [text.encode() for text in s.dry_sequence_breakers]
                breakers = (ctypes.c_char_p * len(texts))(*texts)
                yield flat.llama_sampler_init_dry(
                    vocab,
                    s.dry_multiplier,
                    s.dry_base,
                    s.dry_allowed_length,
                    s.dry_penalty_last_n,
                    breakers,
                    len(texts),
                )
            case "top_n_sigma":
                yield flat.llama_sampler_init_top_n_sigma(s.top_n_sigma)
            case "top_k":
                yield flat.llama_sampler_init_top_k(s.top_k)
            case "typ_p":
                yield flat.llama_sampler_init_typical(s.typical_p, s.min_keep)
            case "top_p":
                yield flat.llama_sampler_init_top_p(s.top_p, s.min_keep)
            case "min_p":
                yield flat.llama_sampler_init_min_p(s.min_p, s.min_keep)
            case "xtc" if s.xtc_probability and not without_xtc:
                # Always, so that the result is not random.
                yield flat.llama_sampler_init_xtc(1.0, s.xtc_threshold, s.min_keep, 1)
            case "infill":
                yield flat.llama_sampler_init_infill(vocab)
            case "temperature":
                parts = s.temperature, s.dynatemp_range, s.dynatemp_exponent
                yield flat.llama_sampler_init_temp_ext(*parts)
    if picks and "adaptive_p" in s.samplers:
        yield flat.llama_sampler_init_adaptive_p(s.adaptive_target, s.adaptive_decay, s.seed)


def applied(chain: Any, logits: Row) -> tuple[dict[int, float], int]:
    """Return the chain's result as token → probability, and the token that it chose or -1."""
    left, chosen = _left(chain, logits)
    with np.errstate(invalid="ignore"):
        weights = np.exp(left["logit"].astype(np.float64) - left["logit"].max())
    shares = dict(zip(left["id"].tolist(), (weights / weights.sum()).tolist(), strict=True))
    return {token: share for token, share in shares.items() if share > 0}, chosen


def left_by(chain: Any, logits: Row) -> Row:
    """Return the logits after a chain that neither drops nor reorders any."""
    left, _ = _left(chain, logits)
    assert left["id"].tolist() == list(range(len(logits)))
    logits_left: Row = left["logit"].copy()
    return logits_left


def _left(chain: Any, logits: Row) -> tuple[Any, int]:
    flat: Any = library.load()
    kind = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    candidates = np.zeros(len(logits), kind)
    candidates["id"], candidates["logit"] = np.arange(len(logits)), logits
    data = candidates.ctypes.data_as(flat.llama_token_data_p)
    array = flat.llama_token_data_array(data, len(candidates), -1, False)
    flat.llama_sampler_apply(chain, ctypes.byref(array))
    # xtc moves the start.
    start = ctypes.cast(array.data, ctypes.c_void_p).value or 0
    first = (start - candidates.ctypes.data) // kind.itemsize
    left = candidates[first : first + array.size]
    return left, int(left["id"][array.selected]) if array.selected >= 0 else -1
