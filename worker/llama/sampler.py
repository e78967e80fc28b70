"""Native sampler chains: one per sequence, built when its request is accepted, freed with it.

A chain is built on the intake thread and used by the engine thread alone from then on.

Order of a chain, as in llama.cpp's own tools: logit bias, penalties, top-k, top-p, min-p,
temperature, then the draw. A constraint stands outside of the chain: the chain draws first, and
only when the drawn token is not allowed does it draw again, from those that are. So no sampler
can take away what the constraint needs, and a model that follows it by itself pays nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker.errors import InferenceFailed, InvalidRequest
from worker.llama import library
from worker.llama.constraint import Follower, GrammarVocabulary
from worker.llama.context import Context
from worker.llama.model import Model
from worker.wire.work import Sampling

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_FORBIDDEN = -np.inf
_COLDEST = 1e-4
"""Below it a temperature is zero: logits that differ at all are e^1000 apart, and dividing by less
overflows."""
_SMALLEST_REPETITION_PENALTY = 1e-2
"""Zero would divide logits by zero; from here on a repeated token wins anyway."""


class Sampler:
    """
    Raises:
        InvalidRequest: the grammar or a biased token id is not valid.
    """

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        prompt: Sequence[int],
        vocabulary: GrammarVocabulary,
    ) -> None:
        self._flat = library.load()
        self._model = model
        constraint = sampling.constraint
        self._follower = vocabulary.follow(constraint, prompt) if constraint is not None else None
        self._chain = self._build_chain(sampling, prompt)
        # The likeliest token needs no chain, which would first copy each logit of the vocabulary
        # into a list of candidates; unless it is an end that is not wanted.
        self._is_argmax = _is_plain_greedy(sampling)
        self._unwanted = model.eog if sampling.ignore_eos else frozenset()
        self._remembers = _has_penalties(sampling)

    def sample(self, context: Context, row: int) -> int:
        """Draw the next token from a row's logits and remember it.

        Raises:
            InferenceFailed: no token can follow under the constraint.
        """
        if self._follower is not None:
            return self._sample_within(self._follower, context, row)
        if self._is_argmax:
            token = int(context.logits(row).argmax())
            if token not in self._unwanted:
                return token
        return int(self._flat.llama_sampler_sample(self._chain, context.pointer, row))

    def _sample_within(self, follower: Follower, context: Context, row: int) -> int:
        flat, logits = self._flat, context.logits(row)
        if self._is_argmax:
            token = int(logits.argmax())
        elif self._remembers:
            token = self._draw(logits, np.arange(len(logits), dtype=np.int32))
        else:  # the chain builds its candidates faster, but takes the token as said
            token = int(flat.llama_sampler_sample(self._chain, context.pointer, row))
        if token in self._unwanted or not follower.take(token):
            token = self._draw_allowed(follower, logits)
        if self._remembers:
            flat.llama_sampler_accept(self._chain, token)
        return token

    def _draw_allowed(self, follower: Follower, logits: npt.NDArray[np.float32]) -> int:
        n_vocab = len(logits)
        if follower.is_waiting:
            allowed = np.arange(n_vocab, dtype=np.int32)
        else:
            allowed = follower.allowed(n_vocab)
        # An end that is not wanted is left out while there is anything else to say.
        ends = self._unwanted if not follower.is_waiting else self._model.eog
        others = allowed[~np.isin(allowed, list(ends))] if ends else allowed
        if not len(others) and len(allowed) and follower.take(int(allowed[0])):
            return int(allowed[0])
        allowed = others
        while len(allowed):
            token = self._draw(logits, allowed)
            if follower.take(token):
                return token
            allowed = allowed[allowed != token]
        raise InferenceFailed("no token of this model can follow under the constraint")

    def follow_produced(self, tokens: Sequence[int]) -> None:
        """Go behind tokens that another engine has drawn: constraint, penalties and dice.

        The dice are thrown once a token, as plain sampling does; where top-k, top-p or min-p left
        a single candidate the other engine threw none, and the rest of the answer may differ.
        """
        flat, n = self._flat, self._flat.llama_sampler_chain_n(self._chain)
        last = flat.llama_sampler_chain_get(self._chain, n - 1)
        candidates = np.zeros(2, _CANDIDATE)
        data = candidates.ctypes.data_as(flat.llama_token_data_p)
        for token in tokens:
            if self._follower is not None:
                self._follower.take(token)
            flat.llama_sampler_accept(self._chain, token)
            two = flat.llama_token_data_array(data, len(candidates), -1, False)
            flat.llama_sampler_apply(last, ctypes.byref(two))

    def close(self) -> None:
        if self._chain is not None:
            self._flat.llama_sampler_free(self._chain)
        self._chain = self._follower = None

    # --- building ------------------------------------------------------------------------

    def _build_chain(self, sampling: Sampling, prompt: Sequence[int]) -> object:
        flat = self._flat
        params = flat.llama_sampler_chain_default_params()
        params.no_perf = True
        chain = flat.llama_sampler_chain_init(params)

        def add(sampler: object) -> None:
            flat.llama_sampler_chain_add(chain, sampler)

        if bias := self._bias(sampling):
            entries = (flat.llama_logit_bias * len(bias))(*bias.items())
            add(flat.llama_sampler_init_logit_bias(self._model.n_vocab, len(bias), entries))
        everything = self._model.trained_context_length + 1
        if sampling.repetition_penalty != 1.0:
            penalty = max(sampling.repetition_penalty, _SMALLEST_REPETITION_PENALTY)
            repetition = flat.llama_sampler_init_penalties(
                self._model.n_vocab, everything, penalty, 0.0, 0.0
            )
            # Repetition counts the prompt too (as transformers does); the other two penalties
            # count the answer alone (as OpenAI does).
            for token in prompt:
                flat.llama_sampler_accept(repetition, token)
            add(repetition)
        if sampling.frequency_penalty or sampling.presence_penalty:
            add(
                flat.llama_sampler_init_penalties(
                    self._model.n_vocab,
                    everything,
                    1.0,
                    sampling.frequency_penalty,
                    sampling.presence_penalty,
                )
            )
        if sampling.temperature < _COLDEST:
            add(flat.llama_sampler_init_greedy())
            return chain
        if sampling.top_k > 0:
            add(flat.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1.0:
            add(flat.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p > 0.0:
            add(flat.llama_sampler_init_min_p(sampling.min_p, 1))
        if sampling.temperature != 1.0:
            add(flat.llama_sampler_init_temp(sampling.temperature))
        add(flat.llama_sampler_init_dist(native_seed(sampling.seed)))
        return chain

    def _bias(self, sampling: Sampling) -> dict[int, float]:
        bias = dict(sampling.logit_bias)
        for token in bias:
            if not 0 <= token < self._model.n_vocab:
                raise InvalidRequest(
                    f"logit_bias: token id {token} is outside of the vocabulary "
                    f"(0..{self._model.n_vocab - 1})",
                    field="logit_bias",
                )
        if sampling.ignore_eos:
            bias.update(dict.fromkeys(self._model.eog, _FORBIDDEN))
        return bias

    def _draw(self, logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]) -> int:
        """Let the chain draw one of `tokens`."""
        flat = self._flat
        candidates = np.empty(len(tokens), _CANDIDATE)
        candidates["id"] = tokens
        candidates["logit"] = logits[tokens]
        candidates["p"] = 0.0
        data = candidates.ctypes.data_as(flat.llama_token_data_p)
        array = flat.llama_token_data_array(data, len(candidates), -1, False)
        flat.llama_sampler_apply(self._chain, ctypes.byref(array))
        assert array.selected >= 0, "a chain ends with a sampler that selects"
        return int(array.data[array.selected].id)


def _has_penalties(sampling: Sampling) -> bool:
    """Whether the chain draws otherwise for what was said before."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def _is_plain_greedy(sampling: Sampling) -> bool:
    return (
        sampling.temperature < _COLDEST and not _has_penalties(sampling) and not sampling.logit_bias
    )


def native_seed(seed: int) -> int:
    """llama.cpp's seeds have 32 bits, the contract's 64: fold them, and keep off the value
    that means «draw one»."""
    folded = (seed ^ (seed >> 32)) & 0xFFFFFFFF
    return folded if folded != 0xFFFFFFFF else 0x7FFFFFFF


def log_probabilities(
    logits: npt.NDArray[np.float32], token: int, n_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Natural log-probability of `token` and of the `n_top` best tokens, before any sampler."""
    peak = logits.max()
    # Single precision, which halves the cost for a large vocabulary; summed in double.
    total = float(peak) + math.log(np.exp(logits - peak).sum(dtype=np.float64))
    top: list[tuple[int, float]] = []
    if n_top:
        best = np.argpartition(logits, -n_top)[-n_top:]
        top = [(int(t), float(logits[t]) - total) for t in best[np.argsort(-logits[best])]]
    return float(logits[token]) - total, top
