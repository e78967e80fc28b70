"""What is told of prompts while they are computed: how far they are, and for evaluations the
log-probabilities of their tokens. Engine thread."""

from __future__ import annotations

import math
from collections.abc import Iterable

from worker.engine.backend import Backend
from worker.engine.sequence import NO_LIMIT
from worker.engine.step import Chunk
from worker.wire.messages import PromptProgress, PromptScored, TokenLogprob


def prompt_events(
    backend: Backend, chunks: Iterable[Chunk], now: float
) -> list[PromptProgress | PromptScored]:
    """Read the log-probabilities from the batch just computed; returns those of complete
    prompts, and the progress of those that report it or take more steps."""
    events: list[PromptProgress | PromptScored] = []
    for index, chunk in enumerate(chunks):
        sequence, start, _ = chunk
        if start >= sequence.n_prompt or sequence.slot is None:
            continue  # it decodes, or has failed in this step
        if sequence.request.reports_progress or chunk.end < sequence.n_prompt:
            n_computed = min(chunk.end, sequence.n_prompt)
            seconds = now - (sequence.started_at or now)
            events.append(PromptProgress(sequence.request_id, n_computed, seconds))
        if sequence.max_rows == NO_LIMIT or not sequence.scores_prompt:
            continue
        n_top = sequence.request.prompt_logprobs or 0
        known, tokens = sequence.prompt_logprobs, sequence.tokens
        if not known:
            first = backend.logprobs(index, tokens[0], 0)
            known.append(TokenLogprob(first.token_id, first.piece, math.nan))
        # A token's row predicts the next token. A prompt that starts over has some scores already.
        for at in range(max(start + 1, len(known)), min(chunk.end + 1, sequence.n_prompt)):
            known.append(backend.logprobs(index, tokens[at], n_top, chunk.end - at))
        if len(known) == sequence.n_prompt:
            events.append(PromptScored(sequence.request_id, tuple(known)))
            sequence.prompt_logprobs, sequence.is_scored = [], True
    return events
