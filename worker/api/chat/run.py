"""Runs a request to generate: starts its jobs and answers with their events, streamed or whole.

A stream gets one chunk for each engine frame, or several with log-probabilities, and a sign of
life after a silence. Runs on the event loop; a thread encodes deltas with many log-probabilities.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec import structs
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from worker.api.chat.answer import Answer, Body, ModelOnly, Read
from worker.api.chat.choice import Choice
from worker.api.chat.delta import Delta
from worker.api.chat.inference import Inference, inference_of
from worker.api.chat.media import Link, check_media
from worker.api.chat.request import Generate
from worker.api.chat.scored import count_scores
from worker.api.http.body import deadline_of, name_ignored, read_as
from worker.api.http.encoding import KEEPALIVES, MANY_VALUES, in_parts, json_answer
from worker.api.http.event_stream import EventStream, cancel_all, while_connected
from worker.api.http.headers import LATE_HEAD, RESUME
from worker.api.http.off_loop import in_background
from worker.api.http.resume import in_a_path, names_asked, owner_of, reading
from worker.api.http.state import AppState
from worker.api.http.stream_log import StreamLog
from worker.errors import InferenceTimeout, WorkerError
from worker.observability.logs import get_logger
from worker.supervisor.job import Inbox, Job, StreamEvent
from worker.wire.work import (
    Detokenize,
    InferenceRequest,
    Medium,
    Prompt,
    Tokenize,
    Work,
)

_VALUES_OF_SCORE = 8
"""An estimate of the JSON values of one log-probability: its token's text, its bytes and so on."""
_log = get_logger()


async def respond(
    request: Request,
    state: AppState,
    body: type[Body],
    read: Read[Body],
    answer_of: type[Answer[Any]],
) -> object:
    """Answer a request to generate; `answer.py` describes what its dialect provides.

    A header of the answer names the fields, and the keywords of schemas, that have no effect.
    """
    deadline = deadline_of(request)

    def prepare(parsed: Body) -> tuple[Body, Generate, Inference] | ModelOnly:
        asked = read(parsed, state)
        if isinstance(asked, ModelOnly):
            return asked
        return parsed, asked, inference_of(asked, state, deadline)

    prepared = await read_as(request, state, body, prepare)
    if isinstance(prepared, ModelOnly):
        if prepared.is_wanted:
            await load_model(request, state)
        return prepared.answer
    parsed, asked, inference = prepared
    if ignored := (*asked.ignored, *inference.not_enforced):
        name_ignored(request, ignored)
    prompts = [
        await with_media(prompt, state, deadline) if getattr(prompt, "media", ()) else prompt
        for prompt in (each.prompt for each in inference.requests[:: asked.n])
    ]
    echoes = [await _echo(request, state, prompt) if asked.echo else "" for prompt in prompts]
    requests = [
        structs.replace(each, prompt=prompts[index // asked.n])
        for index, each in enumerate(inference.requests)
    ]
    inbox = Inbox(state.settings.keepalive if asked.streams else 0)
    names = names_asked(request, asked.id, state) if asked.streams else ()
    jobs: list[Job] = []
    give_up = partial(cancel_all, jobs)
    async with while_connected(request.receive, give_up, may_leave=bool(names)) as left:
        await _start_jobs(jobs, state, requests, asked.n, inference.digests, inbox, left)
        request.state.is_accepted = True
        choices = [
            Choice(index, job, inference.parser_of, echoes[index // asked.n])
            for index, job in enumerate(jobs)
        ]
        answer = answer_of(parsed, asked, choices, state)
        if not asked.streams:
            return await _whole(answer, inbox)
        if LATE_HEAD.of(request) == "1":
            await inbox.begun()
    chunks = _streamed(answer, inbox)
    if names:
        log = StreamLog(jobs, answer.media_type, answer.is_numbered, answer.failure)
        state.streams.open(owner_of(request.scope), names, log, chunks)
        stream = reading(log, 0, state)
        stream.headers[RESUME.name] = in_a_path(asked.id)
        return stream
    return EventStream(chunks, give_up, answer.media_type)


async def _whole(answer: Answer[Any], frames: AsyncIterable[list[StreamEvent]]) -> Response:
    by_id = {choice.job.request_id: choice for choice in answer.choices}
    async for events in frames:
        for event in events:
            choice = by_id[event.request_id]
            for delta in choice.read(event):
                choice.add(delta)
    scored = (scores for each in answer.choices for scores in (each.logprobs, each.prompt_logprobs))
    return await json_answer(_parts(answer), _VALUES_OF_SCORE * sum(map(count_scores, scored)))


def _parts(answer: Answer[Any]) -> Iterable[bytes]:
    """A whole answer as JSON. Its log-probabilities are encoded as the parts are consumed, and
    freed after the last one, those of its text one by one: many at once would block others."""
    yield from in_parts(answer.whole())
    for choice in answer.choices:
        choice.forget_scores()


async def _streamed(
    answer: Answer[Any], frames: AsyncIterable[list[StreamEvent]]
) -> AsyncIterator[bytes]:
    """The chunks of a streamed answer. A frame without events means a silence of the engine; the
    client's can be longer, such as during a call that its dialect sends once it is complete."""
    by_id = {choice.job.request_id: choice for choice in answer.choices}
    asked = answer.asked
    keepalive = KEEPALIVES[answer.media_type.partition(";")[0]]
    silence_seconds = answer.state.settings.keepalive or math.inf
    clock = asyncio.get_running_loop().time
    sent_at = clock()
    is_scored = asked.sampling.logprobs is not None or asked.prompt_logprobs is not None
    async for events in frames:
        parts: list[bytes] = []
        try:
            for event in events:
                choice = by_id[event.request_id]
                for delta in choice.read(event):
                    choice.add(delta)
                    if is_scored and (n_scores := answer.n_scores(delta)):
                        parts.append(await _encoded(answer, choice, delta, n_scores))
                        yield b"".join(parts)  # many tokens' in one chunk would block the loop
                        parts.clear()
                        sent_at = clock()
                    else:
                        parts.append(answer.encode(choice, delta))
        except WorkerError as error:
            error.__traceback__ = None  # no cycle: its frames hold the job, which holds it
            yield b"".join(parts) + answer.failure(error)
            return
        if not (chunk := b"".join(parts)) and (not events or clock() - sent_at >= silence_seconds):
            chunk = keepalive
        if chunk:
            sent_at = clock()
            yield chunk


async def _encoded(answer: Answer[Any], choice: Choice, delta: Delta, n_scores: int) -> bytes:
    """The bytes of a delta with log-probabilities. Other tasks get a turn before, or meanwhile."""
    if _VALUES_OF_SCORE * n_scores >= MANY_VALUES:
        encoded = await in_background(partial(answer.encode, choice, delta))
    else:
        await asyncio.sleep(0)
        encoded = answer.encode(choice, delta)
    choice.forget_scores()
    return encoded


# --- jobs ----------------------------------------------------------------------------------


async def with_media(prompt: Any, state: AppState, deadline: float | None) -> Any:
    """The prompt with the bytes of all of its media; links are fetched.

    Raises:
        InvalidRequest: the model does not accept one of them, or it cannot be fetched.
        NotReady: the model is still loading.
        InferenceTimeout: the deadline passes before all are fetched.
    """
    media: tuple[Medium, ...] = getattr(prompt, "media", ())
    if media:
        check_media(media, state.loaded().projector)
    if not any(isinstance(medium, Link) for medium in media):
        return prompt
    from worker.api.chat.links import fetched  # imports httpx, which only fetching needs

    try:
        async with asyncio.timeout_at(deadline):  # the loop's clock is `time.monotonic()`, too
            return structs.replace(prompt, media=await fetched(media, state))
    except TimeoutError:
        raise InferenceTimeout("The request's deadline has passed.") from None


async def _echo(request: Request, state: AppState, prompt: Prompt) -> str:
    if isinstance(prompt, tuple):
        text: str = await answered(request, state, Detokenize(prompt))
        return text
    assert isinstance(prompt, str), "only a text or tokens can be echoed"
    return prompt


async def _start_jobs(
    jobs: list[Job],
    state: AppState,
    requests: Sequence[InferenceRequest],
    n: int,
    digests: Sequence[str],
    inbox: Inbox,
    left: asyncio.Event,
) -> None:
    """Start the jobs, `n` for each prompt, one after another: each once the engine has accepted the
    one before. Returns once all are accepted; until then a refusal can still decide the status.

    Raises:
        WorkerError: a job is refused.
        ClientDisconnect: the client has left, and no job runs any more.
    """
    try:
        for index, request in enumerate(requests):
            if jobs:
                await state.supervisor.room(inbox)
            # A client that leaves cancels the jobs so far: while one runs, no check is needed.
            if all([job.has_ended for job in jobs]):
                await asyncio.sleep(0)  # one turn of the loop, in which a disconnect is noticed
                if left.is_set():
                    raise ClientDisconnect()
            job = state.supervisor.open(
                request,
                inbox=inbox,
                counts_prompt=index % n == 0,
                n_more=0 if jobs else len(requests) - 1,
            )
            jobs.append(job)
            await job.accepted()
            await state.acceptances.turn()
            _log.info(
                "request.accepted",
                job_id=request.job_id,
                prompt_sha256=digests[index // n],
                prompt_tokens=job.prompt_tokens,
                max_tokens=request.max_tokens,
            )
    finally:
        if len(jobs) < len(requests):
            state.supervisor.expect_no_more(inbox)


# --- work that generates no text -------------------------------------------------------------


async def answered(request: Request, state: AppState, work: Work) -> Any:
    """The engine's answer to `work`, which is cancelled if the client leaves."""
    job = state.supervisor.open(work, deadline_of(request))
    async with while_connected(request.receive, job.cancel):
        try:
            return await job.answer()
        except WorkerError:
            request.state.is_accepted = job.is_accepted
            raise
        finally:
            request.state.held_seconds = held_seconds(request) + job.held_seconds


async def load_model(request: Request, state: AppState) -> None:
    """Wake the worker if it sleeps, and wait until the model is loaded."""
    await answered(request, state, Tokenize(""))


def held_seconds(request: Request) -> float:
    """Seconds that a request's work has waited for an engine that could run it."""
    return getattr(request.state, "held_seconds", 0.0)
