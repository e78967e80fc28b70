"""A supervisor that plays a test's script, for states that a real engine cannot be brought into.

It feeds real jobs; everything from the socket to the event encoding is real. Tests of a healthy
worker use the real process instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from msgspec.structs import replace

from tests.support.status import ready_status
from worker.api.app import create_app
from worker.api.http.connection import protocol_with
from worker.api.http.state import AppState
from worker.errors import WorkerError
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.job import Inbox, Job, StreamEvent
from worker.supervisor.status import WorkerStatus
from worker.supervisor.supervisor import Supervisor
from worker.wire.engine_info import EngineInfo
from worker.wire.messages import (
    Accepted,
    Answered,
    Failed,
    Finished,
    Progress,
    Started,
    Token,
)
from worker.wire.work import InferenceRequest, Work

Step = (
    list[StreamEvent] | float | threading.Event | WorkerError | Callable[[Job], list[StreamEvent]]
)
"""A frame to feed, a function that makes one, seconds or something else to wait for, or the error
that ends the stream."""


def story(*texts: str) -> list[Step]:
    """Started, one frame per text, Finished."""
    frames: list[Step] = [[Started(0, 0)]]
    frames += [[Token(0, text, (index,))] for index, text in enumerate(texts)]
    frames.append([Finished(0, "EOS", len(texts) + 1, 1.0)])
    return frames


class ScriptedSupervisor:
    """Implements the part of `Supervisor` that the HTTP API uses."""

    def __init__(self, metrics: Metrics, info: EngineInfo | None = None) -> None:
        self.metrics = metrics
        self.info = info
        self.script: Sequence[Step] = story("a")
        self.refusal: WorkerError | None = None
        self.replies: Callable[[Work], Any] = lambda work: None
        self.requests: list[InferenceRequest] = []
        self.jobs: dict[str, Job] = {}
        self.cancelled: list[str] = []
        self.progresses: list[Progress] = []
        self._players: set[asyncio.Task[None]] = set()

    def open(
        self,
        work: Work,
        deadline: float | None = None,
        inbox: Inbox | None = None,
        *,
        counts_prompt: bool = True,
        n_more: int = 0,
    ) -> Job:
        if not isinstance(work, InferenceRequest):
            job = Job(1, work, self.metrics, self._dropped)
            job.feed([Answered(1, self.replies(work))])
            return job
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(work)
        inbox, request_id = inbox or Inbox(), len(self.requests)
        job = Job(request_id, work, self.metrics, self._dropped, inbox, counts_prompt)
        job.accept(Accepted(job.request_id, 3))
        self.jobs[work.job_id] = job
        player = asyncio.get_running_loop().create_task(self._play(job, self.script))
        self._players.add(player)
        player.add_done_callback(self._players.discard)
        return job

    async def room(self, inbox: Inbox) -> None:
        return

    def expect_no_more(self, inbox: Inbox) -> None:
        return

    async def _play(self, job: Job, script: Sequence[Step]) -> None:
        for step in script:
            if isinstance(step, float):
                await asyncio.sleep(step)
                continue
            if isinstance(step, threading.Event):
                while not step.is_set():
                    await asyncio.sleep(0.005)
                continue
            if job.has_ended:
                return
            frame = step(job) if callable(step) else step
            if isinstance(frame, WorkerError):
                frame = [Failed(0, frame)]
            job.feed([of(job.request_id, event) for event in frame])
            await asyncio.sleep(0)

    def _dropped(self, job: Job, error: WorkerError) -> None:
        if not job.has_ended:
            assert job.job_id is not None
            self.cancelled.append(job.job_id)
            job.feed([Failed(job.request_id, error)])

    def cancel(self, job_id: str) -> bool:
        if job_id not in self.jobs:
            return False
        self.jobs[job_id].cancel()
        return True

    def status(self) -> WorkerStatus:
        return ready_status(info=self.info)

    async def watch_progress(self, silence_seconds: float = 0.0) -> AsyncIterator[Progress]:
        for progress in self.progresses:
            yield progress


def of(request_id: int, event: StreamEvent) -> StreamEvent:
    """Return the event with that request's id."""
    return replace(event, request_id=request_id)


class _Server(uvicorn.Server):
    """Unlike uvicorn's own server, does not check ten times a second whether it must stop."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.005)


class ScriptedWorker:
    """The HTTP API around a scripted supervisor, on a real socket, in a thread."""

    def __init__(self, settings: Settings, info: EngineInfo | None) -> None:
        self.metrics = Metrics("scripted")
        self.supervisor = ScriptedSupervisor(self.metrics, info)
        self.shutdowns = 0
        self.state = AppState(
            settings=settings,
            supervisor=cast(Supervisor, self.supervisor),
            metrics=self.metrics,
            worker_id="scripted",
            model_ref="tiny",
            incarnation="00000000-0000-0000-0000-000000000000",
            request_shutdown=self._count_shutdown,
        )
        self.base_url = ""
        self.port = 0

    def _count_shutdown(self) -> None:
        self.shutdowns += 1

    @contextlib.contextmanager
    def serve(self) -> Iterator[ScriptedWorker]:
        config = uvicorn.Config(
            create_app(self.state),
            http=protocol_with(
                self.state.settings.slow_reader_timeout, self.metrics.connection_cut
            ),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            self.base_url = f"http://127.0.0.1:{self.port}"
            thread = threading.Thread(target=lambda: uvloop.run(server.serve([listener])))
            thread.start()
            while not server.started:
                time.sleep(0.005)
            try:
                yield self
            finally:
                server.should_exit = True
                thread.join(10)
                assert not thread.is_alive(), "the server did not stop"


ScriptedFactory = Callable[..., ScriptedWorker]


@pytest.fixture
def scripted() -> Iterator[ScriptedFactory]:
    """Starts HTTP APIs around scripted supervisors; keyword arguments are settings."""
    with ExitStack() as stack:

        def start(info: EngineInfo | None = None, **settings: Any) -> ScriptedWorker:
            return stack.enter_context(ScriptedWorker(Settings(**settings), info).serve())

        yield start
