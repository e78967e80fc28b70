"""Runs what a request asks for: its jobs, and their events as one answer, streamed or whole.

There is one piece of a stream for each engine frame, whatever its number of tokens. On the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.dialect import Answer, Body, Read
from worker.api.chat.inference import Inference, inference_of
from worker.api.chat.message import Choice
from worker.api.chat.request import Generate
from worker.api.http.body import deadline_of, read_as
from worker.api.http.encoding import json_response
from worker.api.http.event_stream import EventStream, cancel_all, closing_on_disconnect, watching
from worker.api.http.resume import RESUME, names_asked, owner_of, reading
from worker.api.http.state import AppState
from worker.api.http.stream_log import StreamLog
from worker.errors import WorkerError
from worker.observability.logs import get_logger
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import Failed, Finished, Token
from worker.wire.work import (
    Detokenize,
    InferenceRequest,
    Work,
)

LATE_HEAD = "x-llorch-late-head"
"""With this header set to 1, a stream's head comes with the first token: until then an error is a
status."""

_log = get_logger()
Frame = list[StreamEvent]
"""The events of one choice in one engine frame."""
AnswerOf = Callable[[Body, Generate, Sequence[Choice], AppState], Answer[Any]]


async def respond(
    request: Request,
    state: AppState,
    body: type[Body],
    read: Read[Body],
    answer_of: AnswerOf[Body],
) -> Response:
    """Answer a request to generate in a dialect; `dialect.py` says what it brings.

    The head names the fields, and the keywords of schemas, that have no effect.
    """
    deadline = deadline_of(request)

    def asked_by(found: Body) -> tuple[Body, Generate, Inference] | Response:
        asked = read(found, state)
        if isinstance(asked, Response):
            return asked
        return found, asked, inference_of(asked, state, deadline)

    parsed = await read_as(request, state, body, asked_by)
    if isinstance(parsed, Response):
        return parsed
    found, asked, inference = parsed
    if ignored := (*asked.ignored, *inference.not_enforced):
        request.scope["state"].setdefault("ignored_fields", []).extend(ignored)
    requests = inference.requests
    echoes = await _echoes(request, state, asked, requests) if asked.echo else [""] * len(requests)
    scores_echo = asked.echo and asked.sampling.logprobs is not None
    jobs = await _start_jobs(state, inference)
    choices = [
        Choice(index, job, inference.parser_of, echo, scores_echo=scores_echo)
        for index, (job, echo) in enumerate(zip(jobs, echoes, strict=True))
    ]
    answer = answer_of(found, asked, choices, state)
    frames = aiter(jobs[0]) if len(jobs) == 1 else _pumped(jobs)
    if asked.streams:
        if request.headers.get(LATE_HEAD) == "1":
            frames = await _begun(request, jobs, frames)
        chunks = _streamed(answer, frames)
        if names := names_asked(request, asked.id, state):
            log = StreamLog(jobs, answer.media_type, answer.is_numbered, answer.failure)
            state.streams.open(owner_of(request), names, log, chunks)
            stream = reading(log, 0, state)
            stream.headers[RESUME] = asked.id
            return stream
        return EventStream(chunks, state, jobs, answer.media_type)
    by_id = {choice.job.request_id: choice for choice in choices}
    async with closing_on_disconnect(request, *jobs):
        async for frame in frames:
            choice = by_id[frame[0].request_id]
            for event in frame:
                for delta in choice.read(event):
                    choice.add(delta)
    return json_response(answer.whole())


async def _streamed(answer: Answer[Any], frames: AsyncIterable[Frame]) -> AsyncIterator[bytes]:
    by_id = {choice.job.request_id: choice for choice in answer.choices}
    async for frame in frames:
        choice = by_id[frame[0].request_id]
        parts: list[bytes] = []
        try:
            for event in frame:
                for delta in choice.read(event):
                    choice.add(delta)
                    parts.append(answer.encode(choice, delta))
        except WorkerError as error:
            yield b"".join(parts) + answer.failure(error)
            return
        if chunk := b"".join(parts):
            yield chunk
    if ending := answer.ending():
        yield ending


# --- jobs ----------------------------------------------------------------------------------


async def _echoes(
    request: Request,
    state: AppState,
    asked: Generate,
    requests: Sequence[InferenceRequest],
) -> list[str]:
    """The prompt of each choice as a text."""
    texts: list[str] = []
    for each in requests:
        prompt = each.prompt
        if len(texts) % asked.n:
            texts.append(texts[-1])
        elif isinstance(prompt, tuple):
            texts.append(await answered(request, state, Detokenize(prompt)))
        else:
            assert isinstance(prompt, str), "only a text or tokens can be echoed"
            texts.append(prompt)
    return texts


async def _start_jobs(state: AppState, inference: Inference) -> list[Job]:
    """Start all jobs or none: if one is refused, the others are cancelled.

    Returns once the engine has accepted them, before any status line.
    """
    jobs: list[Job] = []
    try:
        for request, digest in zip(inference.requests, inference.digests, strict=True):
            job = await state.supervisor.submit(request)
            jobs.append(job)
            await state.accepted.enter()
            _log.info(
                "request.accepted",
                job_id=request.job_id,
                prompt_sha256=digest,
                prompt_tokens=job.prompt_tokens,
                max_tokens=request.max_tokens,
            )
    except BaseException:
        cancel_all(jobs)
        raise
    return jobs


# --- frames --------------------------------------------------------------------------------


async def _pumped(jobs: Sequence[Job]) -> AsyncIterator[Frame]:
    """The frames of all jobs, in the order of their arrival."""
    frames: asyncio.Queue[Frame | None] = asyncio.Queue()

    async def pump(job: Job) -> None:
        try:
            async for frame in job:
                frames.put_nowait(frame)
        finally:
            frames.put_nowait(None)

    pumps = [asyncio.create_task(pump(job)) for job in jobs]
    try:
        running = len(pumps)
        while running:
            frame = await frames.get()
            if frame is None:
                running -= 1
            else:
                yield frame
        await asyncio.gather(*pumps)
    finally:
        for task in pumps:
            task.cancel()


async def _begun(
    request: Request, jobs: Sequence[Job], frames: AsyncIterator[Frame]
) -> AsyncIterator[Frame]:
    """The same frames, once the first token or end has come.

    Raises:
        WorkerError: the jobs failed before that.
    """
    held: list[Frame] = []
    try:
        async with watching(request, *jobs):
            async for frame in frames:
                held.append(frame)
                if any(isinstance(event, Token | Finished) for event in frame):
                    break
                if isinstance(last := frame[-1], Failed):
                    raise last.error
    except BaseException:
        cancel_all(jobs)
        raise
    return _chained(held, frames)


async def _chained(held: list[Frame], frames: AsyncIterator[Frame]) -> AsyncIterator[Frame]:
    for frame in held:
        yield frame
    async for frame in frames:
        yield frame


# --- work that generates no text -------------------------------------------------------------


async def answered(request: Request, state: AppState, work: Work) -> Any:
    """The engine's answer, cancelled when the client leaves."""
    job = state.supervisor.open(work, deadline_of(request))
    async with closing_on_disconnect(request, job):
        return await job.answer()
