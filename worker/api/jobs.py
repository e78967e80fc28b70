"""One accepted request as the HTTP surface sees it: its frames, its clock and its metrics.

Runs on the API process's event loop. Whatever the answer's form, a job is counted exactly once:
when its terminal event passes, or when it is closed before that.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

from worker.api.state import AppState
from worker.engine.generation import Generation, StreamEvent
from worker.errors import ShuttingDown, WorkerError
from worker.messages import ChatPrompt, Failed, Finished, InferenceRequest, Started, Token
from worker.observability.logs import digest, get_logger
from worker.observability.metrics import Outcome

_log = get_logger()
_OUTCOMES: dict[str, Outcome] = {"CANCELLED": "cancelled", "INFERENCE_TIMEOUT": "timeout"}


async def start_job(state: AppState, request: InferenceRequest) -> Job:
    """Submit the request; returns once the engine has accepted it, before any status line."""
    try:
        if state.draining():
            raise ShuttingDown("the worker is shutting down and takes no new work")
        generation = await state.supervisor.submit(request)
    except WorkerError as error:
        state.metrics.request_rejected(error.code)
        raise
    state.metrics.request_accepted(generation.prompt_tokens)
    job = Job(state, request, generation)
    try:
        await state.accepted.enter()
    except BaseException:
        job.close()
        raise
    _log.info(
        "request.accepted",
        job_id=request.job_id,
        prompt_sha256=_digest_of(request),
        prompt_tokens=generation.prompt_tokens,
        max_tokens=request.max_tokens,
    )
    return job


class Job:
    """Iterate it for the events, one list per engine frame; `close` it in any case."""

    __slots__ = (
        "_accepted_at",
        "_ended",
        "_first_at",
        "_last_at",
        "_state",
        "cached_tokens",
        "generation",
        "request",
        "started_at_unix",
        "tokens_out",
    )

    def __init__(self, state: AppState, request: InferenceRequest, generation: Generation) -> None:
        self.request = request
        self.generation = generation
        self.cached_tokens = 0
        self.tokens_out = 0
        self.started_at_unix: float | None = None
        self._state = state
        self._accepted_at = time.monotonic()
        self._first_at: float | None = None
        self._last_at = 0.0
        self._ended = False

    @property
    def prompt_tokens(self) -> int:
        return self.generation.prompt_tokens

    @property
    def seed(self) -> int:
        return self.generation.seed

    @property
    def decode_time_ms(self) -> float:
        """Since the first token; the engine's own figure comes with the terminal event."""
        return 0.0 if self._first_at is None else (self._last_at - self._first_at) * 1000

    async def __aiter__(self) -> AsyncIterator[list[StreamEvent]]:
        async for frame in self.generation:
            self._observe(frame)
            yield frame

    def close(self) -> None:
        """Nobody reads any more: cancel what still runs. An ended job ignores it."""
        if not self._ended:
            self.generation.cancel()
            self._end("cancelled")

    def _observe(self, frame: list[StreamEvent]) -> None:
        n_tokens = 0
        for event in frame:
            match event:
                case Token():
                    n_tokens += len(event.token_ids)
                case Started():
                    self.started_at_unix = time.time()
                    self.cached_tokens = event.cached_tokens
                    waited = time.monotonic() - self._accepted_at
                    self._state.metrics.request_started(waited, event.cached_tokens)
        if n_tokens:
            self._observe_tokens(n_tokens)
        match frame[-1]:
            case Finished():
                self._end("success", frame[-1].stop_reason)
            case Failed(error=error):
                self._end(_OUTCOMES.get(error.code, "error"), error.code)

    def _observe_tokens(self, n_tokens: int) -> None:
        now = time.monotonic()
        if self._first_at is None:
            self._first_at = now
            self._state.metrics.first_token(now - self._accepted_at)
            self._state.metrics.tokens(n_tokens, None)
        else:
            self._state.metrics.tokens(n_tokens, (now - self._last_at) / n_tokens)
        self._last_at = now
        self.tokens_out += n_tokens

    def _end(self, outcome: Outcome, reason: str | None = None) -> None:
        self._ended = True
        duration_ms = (time.monotonic() - self._accepted_at) * 1000
        self._state.metrics.request_ended(outcome, duration_ms)
        _log.info(
            "request.ended",
            job_id=self.request.job_id,
            outcome=outcome,
            reason=reason,
            tokens_out=self.tokens_out,
            cached_tokens=self.cached_tokens,
            duration_ms=round(duration_ms, 3),
        )


def _digest_of(request: InferenceRequest) -> str:
    prompt = request.prompt
    if isinstance(prompt, str):
        return digest(prompt)
    if isinstance(prompt, ChatPrompt):
        return digest(json.dumps([dict(message) for message in prompt.messages], default=str))
    return digest(repr(prompt))
