"""Native sampler chains: one per sequence, built when its request is accepted, freed with it.

A chain is built on the intake thread and used by the engine thread alone from then on.

Order of a chain, as in llama.cpp's own tools: logit bias, penalties, top-k, top-p, min-p,
temperature, then the draw. A grammar stands outside of the chain: the chain draws first, and only
when the grammar forbids the drawn token are all candidates checked and drawn from again. Checking
the whole vocabulary at each token would cost more than small models take to compute it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from worker.errors import InvalidRequest
from worker.llama import library
from worker.llama.context import Context
from worker.llama.model import Model
from worker.messages import Sampling

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_FORBIDDEN = -np.inf
_SMALLEST_REPETITION_PENALTY = 1e-2
"""Zero would divide logits by zero; from here on a repeated token wins anyway."""


class Sampler:
    """
    Raises:
        InvalidRequest: the grammar or a biased token id is not valid.
    """

    def __init__(self, model: Model, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._flat = library.load()
        self._model = model
        grammar = sampling.grammar
        self._grammar = _compile(model, grammar) if grammar is not None else None
        self._chain = self._build_chain(sampling, prompt)
        # The likeliest token needs no chain, which would first copy each logit of the vocabulary
        # into a list of candidates; unless it is an end that is not wanted.
        self._is_argmax = grammar is None and _is_plain_greedy(sampling)
        self._unwanted = model.eog if sampling.ignore_eos else frozenset()

    def sample(self, context: Context, row: int) -> int:
        """Draw the next token from a row's logits and remember it."""
        if self._is_argmax:
            token = int(context.logits(row).argmax())
            if token not in self._unwanted:
                return token
        if self._grammar is None:
            return int(self._flat.llama_sampler_sample(self._chain, context.pointer, row))
        flat = self._flat
        logits = context.logits(row)
        token = self._draw(logits, self._chain)
        if not self._allows(token):
            token = self._draw(logits, self._grammar, self._chain)
        flat.llama_sampler_accept(self._grammar, token)
        flat.llama_sampler_accept(self._chain, token)
        return token

    def close(self) -> None:
        for pointer in (self._chain, self._grammar):
            if pointer is not None:
                self._flat.llama_sampler_free(pointer)
        self._chain = self._grammar = None

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
        if sampling.temperature == 0.0:
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

    # --- drawing under a grammar ---------------------------------------------------------

    def _allows(self, token: int) -> bool:
        candidate = np.zeros(1, _CANDIDATE)
        candidate["id"] = token
        self._apply(candidate, self._grammar)
        return bool(np.isfinite(candidate["logit"][0]))

    def _draw(self, logits: npt.NDArray[np.float32], *samplers: object) -> int:
        candidates = np.empty(len(logits), _CANDIDATE)
        candidates["id"] = np.arange(len(logits), dtype=np.int32)
        candidates["logit"] = logits
        candidates["p"] = 0.0
        array = self._apply(candidates, *samplers)
        assert array.selected >= 0, "a chain ends with a sampler that selects"
        return int(array.data[array.selected].id)

    def _apply(self, candidates: npt.NDArray[np.void], *samplers: object) -> ctypes.Structure:
        flat = self._flat
        data = candidates.ctypes.data_as(flat.llama_token_data_p)
        array = flat.llama_token_data_array(data, len(candidates), -1, False)
        for sampler in samplers:
            flat.llama_sampler_apply(sampler, ctypes.byref(array))
        structure: ctypes.Structure = array
        return structure


def _is_plain_greedy(sampling: Sampling) -> bool:
    return (
        sampling.temperature == 0.0
        and sampling.repetition_penalty == 1.0
        and not sampling.frequency_penalty
        and not sampling.presence_penalty
        and not sampling.logit_bias
    )


def native_seed(seed: int) -> int:
    """llama.cpp's seeds have 32 bits, the contract's 64: fold them, and keep off the value
    that means «draw one»."""
    folded = (seed ^ (seed >> 32)) & 0xFFFFFFFF
    return folded if folded != 0xFFFFFFFF else 0x7FFFFFFF


def _compile(model: Model, grammar: str) -> object:
    flat = library.load()
    with library.log.capture() as lines:
        pointer = flat.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root")
    if not pointer:
        reason = next((line for line in lines if line.strip()), "it cannot be parsed")
        raise InvalidRequest(f"grammar: {reason.strip()}", field="grammar")
    compiled: object = pointer
    return compiled


def log_probabilities(
    logits: npt.NDArray[np.float32], token: int, n_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Natural log-probability of `token` and of the `n_top` best tokens, before any sampler."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    top: list[tuple[int, float]] = []
    if n_top:
        best = np.argpartition(shifted, -n_top)[-n_top:]
        top = [(int(t), float(shifted[t])) for t in best[np.argsort(-shifted[best])]]
    return float(shifted[token]), top
