"""Turns what a step has computed into events: progress and log-probabilities of prompts, the text
of drawn tokens, the end of an answer. Engine thread."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from worker.engine.model_runner import ModelRunner
from worker.engine.sequence import Sequence
from worker.engine.step import Chunk
from worker.wire.messages import (
    Event,
    Finished,
    PromptProgress,
    PromptScored,
    StopReason,
    Token,
    TokenLogprob,
)
from worker.wire.work import LineLimits

Drawn = tuple[Sequence, int, int]
"""A sequence, the index of the chunk after which a token was drawn for it, and the token."""
_NO_LIMITS = LineLimits()
_SCORES_AT_ONCE = 2048
"""The most log-probabilities of a prompt in one event, alternatives included."""
_LEAST_SECONDS = 1e-6
"""The shortest time reported for an answer, as in llama-server: clients divide by it."""
_MOST_TEXTS = 1 << 17
"""The most tokens whose texts are kept."""


class Answers:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._texts: dict[int, str] = {}
        """The text that a token adds to any answer; empty if the token ends the answer, is a part
        of a character or has no text."""

    def take_plain(self, drawn: list[Drawn], events: list[Event]) -> Iterator[Drawn]:
        """Emit the tokens whose text is complete and needs no check, as most are.

        Yields each other token in its turn; pass it to `take` before asking for the next.
        """
        texts = self._texts
        for each in drawn:
            sequence, _, token = each
            if sequence.slot is None:
                continue  # an earlier one of its tokens ended it
            tokens = sequence.tokens
            if sequence.holds_nothing and len(tokens) + 1 < sequence.n_most:
                text = texts.get(token)
                if text is None:
                    text = self._learn(token)
                if text:
                    tokens.append(token)
                    events.append(Token(sequence.request_id, text, (token,)))
                    continue
            yield each

    def take(
        self, sequence: Sequence, index: int, token: int, events: list[Event]
    ) -> tuple[StopReason, str | None] | None:
        """Append a token that was drawn after chunk number `index`, and emit the text that it
        completes.

        Returns why the answer ends and the stop that matched, or `None` if the answer continues.
        """
        request = sequence.request
        if request.max_tokens == 0:
            return "MAX_TOKENS", None
        is_eog = self._runner.is_eog(token) or token in request.sampling.stop_token_ids
        n_top = request.sampling.logprobs
        if n_top is not None and (request.scores_end or not is_eog):
            sequence.pending_logprobs.append(self._logprob(sequence, index, token, n_top))
        if is_eog:
            sequence.end_token = token
            return "EOS", None
        sequence.tokens.append(token)
        sequence.pending_ids.append(token)
        known = self._texts.get(token)
        if known is None:
            known = self._learn(token)
        text = known
        if not known or sequence.characters.buffer:
            piece = known.encode() if known else self._runner.piece(token, request.shown_tokens)
            text = sequence.characters.decode(piece)
        text, stop = sequence.match_stops(text)
        _emit(sequence, text, events)
        sequence.holds_nothing = not (
            sequence.pending_ids
            or sequence.characters.buffer
            or request.stop
            or request.lines != _NO_LIMITS
            or n_top is not None
            or request.sampling.stop_token_ids
            or request.sampling.learns
            or sequence.n_released < request.sent_chars
        )
        if stop is not None:
            return "STOP_SEQUENCE", stop
        if sequence.lines.is_over or len(sequence.tokens) >= sequence.n_most:
            return "MAX_TOKENS", None
        return None

    def _logprob(self, sequence: Sequence, index: int, token: int, n_top: int) -> TokenLogprob:
        """The log-probabilities of a token and its alternatives, before or after sampling."""
        if not sequence.request.sampling.post_sampling_probs:
            scored = self._runner.logprobs(index, token, n_top)
        else:
            found = sequence.sampler.chain.log_probabilities(token, n_top)
            scored = self._runner.scored(token, *found)
        return replace(scored, begin=sequence.n_read)

    def _learn(self, token: int) -> str:
        try:
            text = "" if self._runner.is_eog(token) else self._runner.piece(token).decode()
        except UnicodeDecodeError:
            text = ""
        if len(self._texts) < _MOST_TEXTS:
            self._texts[token] = text
        return text

    @staticmethod
    def finish(
        sequence: Sequence, reason: StopReason, stop: str | None, now: float, events: list[Event]
    ) -> None:
        """Emit the text that was held back, then the end."""
        if stop is None:
            # What is held back begins a stop that did not come, or is a part of a character. Such
            # a part becomes U+FFFD, which may complete a stop.
            text, stop = sequence.stops.feed(sequence.characters.decode(b"", final=True))
            if stop is None:
                text += sequence.stops.finish()
            else:
                reason = "STOP_SEQUENCE"
            _emit(sequence, sequence.lines.feed(text), events)
        # What is still pending was then cut off by a stop or a line limit.
        is_cut = stop is not None or sequence.lines.is_over
        ended_by = () if sequence.end_token is None else (sequence.end_token,)
        started_at, first_at = sequence.started_at, sequence.first_token_at
        assert started_at is not None and first_at is not None, "a token was drawn"
        events.append(
            Finished(
                sequence.request_id,
                reason,
                sequence.n_out + len(ended_by),
                round(1000 * max(now - first_at, _LEAST_SECONDS), 3),
                stop,
                round(1000 * (first_at - started_at), 3),
                () if is_cut else tuple(sequence.pending_logprobs),
                (*sequence.pending_ids, *ended_by),
            )
        )


def _emit(sequence: Sequence, text: str, events: list[Event]) -> None:
    """Emit a text with the tokens that begin before its end, without what earlier engines sent."""
    request, start = sequence.request, sequence.n_released
    sequence.n_released += len(text)
    if start < request.sent_chars:
        text, start = text[request.sent_chars - start :], request.sent_chars
    ids, logprobs = sequence.pending_ids, sequence.pending_logprobs
    n = bisect_left(sequence.begins, sequence.n_released)
    if not (text or n):
        return
    learned = sequence.sampler.chain.last.state if request.sampling.learns else ()
    begins: tuple[int, ...] = ()
    if n and sequence.begins[n - 1] > start:
        begins = tuple([max(begin - start, 0) for begin in sequence.begins[:n]])
    scores = tuple(logprobs[:n])
    events.append(Token(sequence.request_id, text, tuple(ids[:n]), scores, learned, begins))
    del ids[:n], logprobs[:n], sequence.begins[:n]


def prompt_events(
    runner: ModelRunner, chunks: Iterable[Chunk], now: float
) -> list[PromptProgress | PromptScored]:
    """Read the log-probabilities of prompts from the batch just computed. Returns those of complete
    prompts, and the progress of prompts that report it or need more steps."""
    events: list[PromptProgress | PromptScored] = []
    for index, chunk in enumerate(chunks):
        sequence, start, _ = chunk
        if start >= sequence.n_prompt or sequence.slot is None:
            continue  # it decodes, or has failed in this step
        n_computed = min(chunk.end, sequence.n_prompt)
        is_new = n_computed > sequence.n_reported and sequence.first_token_at is None
        if is_new and (sequence.request.reports_progress or chunk.end < sequence.n_prompt):
            sequence.n_reported = n_computed
            seconds = now - (sequence.started_at or now)
            events.append(PromptProgress(sequence.request_id, n_computed, seconds))
        if not sequence.scores_prompt:
            continue
        n_top = sequence.request.prompt_logprobs or 0
        known, tokens = sequence.prompt_logprobs, sequence.tokens
        if not start:  # if the prompt starts over, what was known may be NaN
            first = runner.logprobs(index, tokens[0], 0)
            known[:] = [TokenLogprob(first.token_id, first.piece, math.nan)]
        # A token's row predicts the next token. The scores from earlier steps are kept.
        for at in range(max(start + 1, len(known)), min(chunk.end + 1, sequence.n_prompt)):
            known.append(runner.logprobs(index, tokens[at], n_top, chunk.end - at))
        is_number = len(known) == 1 or not math.isnan(known[-1].logprob)
        if len(known) == sequence.n_prompt and is_number:  # after NaN it starts over, or fails
            n_each = max(1, _SCORES_AT_ONCE // (1 + n_top))
            for at in range(0, len(known), n_each):
                part, n_left = known[at : at + n_each], max(0, len(known) - at - n_each)
                events.append(PromptScored(sequence.request_id, tuple(part), n_left))
            sequence.prompt_logprobs, sequence.is_scored = [], True
    return events
