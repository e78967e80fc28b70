"""Turns a parsed request into a running job and its answer. On the API process's event loop."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from worker.api.body import deadline_of
from worker.api.event_stream import closing_on_disconnect, watching
from worker.api.state import AppState, state_of
from worker.observability.logs import digest, get_logger
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import Failed, Finished, Token
from worker.wire.work import ApplyTemplate, ChatPrompt, InferenceRequest, Tokenize, Tokenized, Work

LATE_HEAD = "x-llorch-late-head"

_log = get_logger()
Item = TypeVar("Item")


async def start_jobs(state: AppState, requests: Sequence[InferenceRequest]) -> list[Job]:
    """Start all jobs or none: if one is refused, the others are cancelled."""
    jobs: list[Job] = []
    try:
        for request in requests:
            jobs.append(await start_job(state, request))
    except BaseException:
        for job in jobs:
            job.cancel()
        raise
    return jobs


async def start_job(state: AppState, request: InferenceRequest) -> Job:
    """Submit the request; returns once the engine has accepted it, before any status line is
    sent."""
    job = await state.supervisor.submit(request)
    try:
        await state.accepted.enter()
    except BaseException:
        job.cancel()
        raise
    _log.info(
        "request.accepted",
        job_id=request.job_id,
        prompt_sha256=_digest_of(request),
        prompt_tokens=job.prompt_tokens,
        max_tokens=request.max_tokens,
    )
    return job


async def answer(request: Request, work: Work) -> Any:
    """The engine's answer to work that generates no text; it is cancelled when the client
    leaves."""
    job = state_of(request).supervisor.open(work, deadline_of(request))
    async with closing_on_disconnect(request, job):
        return await job.answer()


async def count_tokens(request: Request, prompt: ChatPrompt) -> int:
    """The tokens of a chat as the model's template writes it."""
    text: str = await answer(request, ApplyTemplate(prompt))
    tokens: Tokenized = await answer(request, Tokenize(text, add_special=True))
    return len(array("i", tokens.ids))


async def with_head(
    request: Request,
    jobs: Sequence[Job],
    frames: AsyncIterator[Item],
    events_of: Callable[[Item], list[StreamEvent]],
) -> AsyncIterable[Item]:
    """Pass on `frames`; with `x-llorch-late-head`, only after the first token or end has come.

    Raises:
        WorkerError: the jobs failed before their first token (with a late head only).
    """
    if request.headers.get(LATE_HEAD) != "1":
        return frames
    held: list[Item] = []
    try:
        async with watching(request, *jobs):
            async for item in frames:
                held.append(item)
                events = events_of(item)
                if any(isinstance(event, Token | Finished) for event in events):
                    break
                if isinstance(events[-1], Failed):
                    raise events[-1].error
    except BaseException:
        for job in jobs:
            job.cancel()
        raise
    return _chained(held, frames)


async def _chained(held: list[Item], frames: AsyncIterator[Item]) -> AsyncIterator[Item]:
    for item in held:
        yield item
    async for item in frames:
        yield item


def _digest_of(request: InferenceRequest) -> str:
    prompt = request.prompt
    if isinstance(prompt, str):
        return digest(prompt)
    if isinstance(prompt, ChatPrompt):
        return digest(json.dumps([dict(message) for message in prompt.messages], default=str))
    return digest(repr(prompt))
