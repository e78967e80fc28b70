"""Samples the next token of one sequence.

A sampler is built on an intake thread when its request is accepted. From then on, only the engine
thread uses it.

A constraint is applied after the draw: a token is drawn first, and only if it is not allowed is
another one drawn from those that are. No other parameter can thus remove the tokens that the
constraint needs, and a model that follows the constraint by itself loses no time.

Some tokens are given instead of drawn: those that close reasoning whose budget is spent, and text
that a constraint forces, split as by the tokenizer. They need no logits, so all of them are taken
at once (`take_given`). Constraint, penalties and random numbers advance past them as past any
other token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from worker.errors import InvalidRequest
from worker.llama.chain import Chain, Step, Undo, infill
from worker.llama.constraint import Follower, GrammarVocabulary
from worker.llama.context import Context
from worker.llama.draw import NotANumber, dice, largest, likeliest
from worker.llama.model import Model
from worker.llama.penalties import Bias, Dry, Penalties, breakers_of
from worker.llama.reasoning import PROMPT_END_TOKENS, ReasoningTrack
from worker.wire.sampling import ReasoningRules, Sampling

_FORBIDDEN = -math.inf
_XTC = 0x787463
"""Changes the seed for xtc, whose random numbers must differ from those that draw the token."""


class Sampler:
    """Raises `InvalidRequest` if the grammar or a biased token id is invalid."""

    def __init__(
        self,
        model: Model,
        sampling: Sampling,
        prompt: Sequence[int],
        vocabulary: GrammarVocabulary,
    ) -> None:
        self._model, self._sampling, self._seed = model, sampling, sampling.seed
        self._n_drawn = 0
        constraint = sampling.constraint
        waits = constraint is not None and constraint.follows_reasoning
        # An answer that is constrained from its first token on has no reasoning.
        rules = sampling.reasoning if constraint is None or waits else None
        self._rules, self._prompt_end = rules, prompt[-PROMPT_END_TOKENS:]
        self._reasoning: ReasoningTrack | None = None
        if rules is not None and (rules.budget is not None or waits):
            self._reasoning = self._track(rules)
        self._follower: Follower | None = None
        if constraint is not None:
            self._follower = vocabulary.follow(constraint, self._reasoning if waits else None)
        self._may_force = constraint is not None and not sampling.logit_bias
        """False with a bias, which can contradict how the tokenizer splits a text."""
        self._forced: list[int] = []
        """The tokens that the constraint forces, the next one last."""
        self._forced_at = -1
        """`_n_drawn` when the constraint was last asked."""
        self.forced = bytearray()
        """With a constraint, for each token since the prompt, whether it was forced."""
        self.may_give = self._reasoning is not None or self._may_force
        """Whether tokens can be given."""
        self._unwanted = model.eog if sampling.ignore_eos else frozenset()
        self._min_tokens = sampling.min_tokens
        stops = {token for token in sampling.stop_token_ids if token < model.n_vocab}
        self._ends = model.eog | stops
        undo = Undo()
        self._memories = _memories(model, sampling, prompt, undo)
        changes: dict[str, Step] = {**self._memories}
        if "infill" in sampling.samplers:
            changes["infill"] = partial(infill, model)
        bias = _bias(model, sampling)
        self._banned = frozenset(token for token, added in bias.items() if added == _FORBIDDEN)
        if bias:
            changes["bias"] = Bias(bias, undo)
        self.chain = Chain(sampling, changes, undo, model.n_vocab)
        self._is_plain = self.chain.is_greedy and not (
            constraint is not None
            or self._reasoning is not None
            or sampling.min_tokens
            or sampling.post_sampling_probs
            or len(bias) > len(self._banned)
        )
        """Whether the likeliest token is taken without a full draw, unless it is forbidden."""

    def sample(self, context: Context, row: int) -> int:
        """Draw the next token, unless it is given.

        Raises:
            InvalidRequest: the request's constraint and what it forbids leave no token.
            NotANumber: the largest logit is NaN or infinite.
        """
        if self.may_give and (given := self._next_given()) is not None:
            if not math.isfinite(context.logits(row).max()):
                raise NotANumber
            self._take(given)
            return given
        logits = context.logits(row)
        if self._is_plain:
            token = likeliest(logits)
            if token not in self._banned:
                return token
        if self._n_drawn >= self._min_tokens:
            return self._draw(logits, self._unwanted)
        if self._follower is not None:
            return self._draw(logits, self._ends)
        ends = list(self._ends)
        saved = logits[ends]
        logits[ends] = _FORBIDDEN
        try:
            return self._draw(logits, self._unwanted)
        finally:
            logits[ends] = saved

    def guess(self, logits: npt.NDArray[np.float32], ahead: int) -> int:
        """The token that would be drawn from a draft model's logits `ahead` tokens further on,
        without bias, penalties and constraint."""
        return self._draw_from(logits, self._n_drawn + ahead, chain=self._guessing_chain)

    @cached_property
    def _guessing_chain(self) -> Chain:
        return Chain(self._sampling, {}, Undo(), self._model.n_vocab)

    def _draw_from(
        self,
        logits: npt.NDArray[np.float32],
        position: int,
        attempt: int = 0,
        chain: Chain | None = None,
    ) -> int:
        chain = chain or self.chain
        number = dice(self._seed, position, attempt)
        chance = dice(self._seed ^ _XTC, position, attempt) if chain.needs_chance else 1.0
        token = chain.draw(logits, number, chance)
        if logits[token] == _FORBIDDEN or token in self._banned:
            # If no continuation is likely, `infill` ends the text even if the end is forbidden.
            token = likeliest(self._without_banned(logits))
            chain.give()
        return token

    def _without_banned(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        left = logits.copy()
        n_known = len(left)  # a draft model may know fewer tokens
        left[[token for token in self._banned if token < n_known]] = _FORBIDDEN
        return left

    def _draw(self, logits: npt.NDArray[np.float32], unwanted: frozenset[int]) -> int:
        token = self._draw_from(logits, self._n_drawn)
        if self._follower is not None and (token in unwanted or not self._follower.take(token)):
            token = self._draw_allowed(self._follower, logits, unwanted)
        self.chain.take()
        self._advance(token)
        return token

    def take_given(self, most: int) -> list[int]:
        """Take the tokens that are given next, `most` at most, up to one that must be drawn."""
        tokens: list[int] = []
        while len(tokens) < most and (given := self._next_given()) is not None:
            self._take(given)
            tokens.append(given)
        return tokens

    def _next_given(self) -> int | None:
        if self._reasoning is not None and (given := self._reasoning.given) is not None:
            return given
        if not self._may_force or self._follower is None:
            return None
        if not self._forced and self._forced_at != self._n_drawn:
            self._forced, self._forced_at = self._follower.forced()[::-1], self._n_drawn
        return self._forced[-1] if self._forced else None

    def ahead(self) -> Follower | None:
        """A copy of the constraint in its current state, to find out what can follow; `None` while
        no constraint can force text."""
        if not self._may_force or self._follower is None or self._follower.is_waiting:
            return None
        return self._follower.copy()

    def end_reasoning(self, produced: Sequence[int]) -> None:
        """Close the open block of reasoning, after a character that it has begun, and any later
        one. `produced` are the tokens of the answer so far."""
        if self._rules is None:
            return
        if self._reasoning is None:
            self._reasoning = self._track(self._rules)
            for token in produced:
                self._reasoning.take(token)
            self._is_plain, self.may_give = False, True
        self._reasoning.end()

    def _track(self, rules: ReasoningRules) -> ReasoningTrack:
        reopens = self._sampling.constraint is None
        return ReasoningTrack(rules, self._model, self._prompt_end, reopens=reopens)

    def _take(self, token: int) -> None:
        """Advance past a token that was not drawn here."""
        if self._follower is not None:
            self._follower.take(token)
        self.chain.give()
        self._advance(token)

    def _advance(self, token: int) -> None:
        self._n_drawn += 1
        is_forced = bool(self._forced) and self._forced.pop() == token
        self.forced.append(is_forced)
        if not is_forced:
            self._forced.clear()
        for memory in self._memories.values():
            memory.remember(token)
        if self._reasoning is not None:
            self._reasoning.take(token)

    def _draw_allowed(
        self, follower: Follower, logits: npt.NDArray[np.float32], unwanted: frozenset[int]
    ) -> int:
        """Draw from the tokens that the mask allows, until `follower` accepts one."""
        if follower.is_waiting:
            left = logits.copy()
            left[[*self._model.eog, *unwanted]] = _FORBIDDEN
        else:
            allowed = follower.allowed(len(logits))
            left = np.where(allowed, logits, np.float32(_FORBIDDEN))
            ends = [token for token in unwanted if allowed[token]]
            # An unwanted end is excluded while any other token is allowed.
            left[ends] = _FORBIDDEN
            if ends and left.max() == _FORBIDDEN:
                end = max(ends, key=logits.__getitem__)
                if follower.take(end):
                    self.chain.give()
                    return end
        left, attempt = self._without_banned(left), 0
        while left.max() > _FORBIDDEN:
            attempt += 1
            token = self._draw_from(left, self._n_drawn, attempt)
            if follower.take(token):
                return token
            left[token] = _FORBIDDEN
        why = ", as the request forbids those that could" if self._banned else ""
        raise InvalidRequest.of_field(follower.field, f"no token of this model can follow{why}")

    def follow_produced(self, tokens: Sequence[int], learned: tuple[float, ...] = ()) -> None:
        """Advance constraint, penalties and random numbers past tokens that another engine drew.
        `learned` is the state of that engine's `chain.last` after them."""
        for token in tokens:
            self._next_given()  # asks the constraint what it forces
            self._take(token)
        if learned:
            self.chain.last.state = learned


def _bias(model: Model, sampling: Sampling) -> dict[int, float]:
    bias: dict[int, float] = {}
    for given, added in sampling.logit_bias:
        if isinstance(given, str):
            ids = model.tokenize(given, add_special=False, parse_special=False)
            bias.update(dict.fromkeys(ids, added))
        elif 0 <= given < model.n_vocab:
            bias[given] = added
        else:
            why = f"token id {given} is outside of the vocabulary (0..{model.n_vocab - 1})"
            raise InvalidRequest.of_field("logit_bias", why)
    if sampling.ignore_eos:
        bias.update(dict.fromkeys(model.eog, _FORBIDDEN))
    return bias


def _memories(
    model: Model, sampling: Sampling, prompt: Sequence[int], undo: Undo
) -> dict[str, Penalties | Dry]:
    """The chain's steps that remember the text, by the samplers' names."""
    found: dict[str, Penalties | Dry] = {}
    if sampling.mirostat:
        return found
    penalises = (
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
    )
    if "penalties" in sampling.samplers and penalises and sampling.repeat_last_n != 0:
        found["penalties"] = Penalties(sampling, prompt, undo)
    is_dry_on = sampling.dry_multiplier != 0 and sampling.dry_base >= 1
    if "dry" in sampling.samplers and is_dry_on and sampling.dry_penalty_last_n != 0:
        breakers = breakers_of(model, sampling.dry_sequence_breakers)
        found["dry"] = Dry(sampling, prompt, breakers, model.n_vocab, undo)
    return found


def log_probabilities(
    logits: npt.NDArray[np.float32], token: int, n_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """The natural log-probability of `token` and of the `n_top` best tokens, before any sampler."""
    peak = logits.max()
    # Single precision is faster for a large vocabulary; the sum is in double precision.
    total = float(peak) + math.log(np.exp(logits - peak).sum(dtype=np.float64))
    top: list[tuple[int, float]] = []
    if n_top:
        top = [(int(t), float(logits[t]) - total) for t in largest(logits, n_top)]
    return float(logits[token]) - total, top
