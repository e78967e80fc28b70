"""Turns a parsed request into a running job and its answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.output import Frame, Output, merged
from worker.api.dialects.openai.generation import Generation
from worker.api.http.body import deadline_of
from worker.api.http.encoding import json_response
from worker.api.http.event_stream import EventStream, cancel_all, closing_on_disconnect, watching
from worker.api.http.state import AppState, state_of
from worker.errors import WorkerError
from worker.observability.logs import digest, get_logger
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import Failed, Finished, Token
from worker.wire.work import ApplyTemplate, ChatPrompt, InferenceRequest, Tokenize, Tokenized, Work

LATE_HEAD = "x-llorch-late-head"

_log = get_logger()
Item = TypeVar("Item")


class Answer(ABC):
    """The answer to a generation in one dialect. Each method raises the error of a failed job."""

    @abstractmethod
    def take(self, index: int, event: StreamEvent) -> None:
        """Take an event of choice `index` for the whole answer."""

    @abstractmethod
    def whole(self) -> Any: ...

    @abstractmethod
    def parts(self, index: int, event: StreamEvent) -> Iterable[bytes]:
        """Take an event of choice `index`; returns what it adds to a stream."""

    @abstractmethod
    def failure(self, error: WorkerError) -> bytes:
        """The end of a stream whose job failed."""

    def ending(self) -> bytes:
        """What follows the last event of a stream."""
        return b""


async def respond(
    request: Request, generation: Generation, answer_of: Callable[[list[Output]], Answer]
) -> Response:
    """Run the jobs of a generation; the response is their answer, streamed if that was asked.

    Its head names the keywords of schemas that are not enforced.
    """
    state = state_of(request)
    request.scope["state"].setdefault("ignored_fields", []).extend(generation.not_enforced)
    jobs = await _start_jobs(state, generation.requests)
    answer = answer_of(generation.outputs(jobs))
    if not generation.body.stream:
        async with closing_on_disconnect(request, *jobs):
            async for index, frame in merged(jobs):
                for event in frame:
                    answer.take(index, event)
        return json_response(answer.whole())
    frames = await with_head(request, jobs, merged(jobs), lambda frame: frame[1])
    return EventStream(_chunks(answer, frames), state, jobs)


async def _chunks(answer: Answer, frames: AsyncIterable[Frame]) -> AsyncIterator[bytes]:
    """The stream in pieces to send: one for each frame, whatever its number of tokens."""
    async for index, frame in frames:
        parts: list[bytes] = []
        try:
            for event in frame:
                parts += answer.parts(index, event)
        except WorkerError as error:
            yield b"".join(parts) + answer.failure(error)
            return
        if parts:
            yield b"".join(parts)
    if ending := answer.ending():
        yield ending


async def _start_jobs(state: AppState, requests: Sequence[InferenceRequest]) -> list[Job]:
    """Start all jobs or none: if one is refused, the others are cancelled."""
    jobs: list[Job] = []
    try:
        for request in requests:
            jobs.append(await start_job(state, request))
    except BaseException:
        cancel_all(jobs)
        raise
    return jobs


async def start_job(state: AppState, request: InferenceRequest) -> Job:
    """Submit the request; returns once the engine has accepted it, before any status line."""
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
    """The engine's answer to work that generates no text, cancelled when the client leaves."""
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
        cancel_all(jobs)
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
