"""A supervisor over the scripted engine, for tests of failures."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests import ROOT
from worker.errors import WorkerError
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.supervisor.engine_process import EngineProcess
from worker.supervisor.job import Job, StreamEvent
from worker.supervisor.supervisor import Supervisor
from worker.wire.engine_settings import EngineSettings
from worker.wire.messages import LoadModel
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest, Work

CONFIG = LoadModel(EngineSettings(), "/none", "scripted", "w")


def scripted() -> tuple[str, ...]:
    """The command of the scripted engine, which inherits no variables of the test."""
    command = (sys.executable, "-m", "tests.support.scripted_engine")
    return (*command, "--script", os.environ["SCRIPTED_ENGINE"])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the script of what each incarnation of the engine does at its start."""
    path = tmp_path / "script"
    monkeypatch.setenv("SCRIPTED_ENGINE", str(path))
    monkeypatch.chdir(ROOT)

    def write(*starts: str) -> None:
        path.write_text("\n".join(starts) + "\n")

    write("ok")
    return write


async def submit(supervisor: Supervisor, work: InferenceRequest) -> Job:
    """Return a job that the engine has accepted; raises its refusal."""
    job = supervisor.open(work)
    try:
        await job.accepted()
    except asyncio.CancelledError:
        job.cancel()
        raise
    return job


async def ask(supervisor: Supervisor, work: Work) -> Any:
    """Return the answer to work that generates no text."""
    job = supervisor.open(work)
    try:
        return await job.answer()
    finally:
        job.cancel()


@asynccontextmanager
async def unstarted(
    command: Sequence[str] | None = None, **settings: Any
) -> AsyncIterator[Supervisor]:
    """A supervisor without an engine yet; `command` replaces the scripted engine."""
    engine = EngineProcess(command or scripted())
    supervisor = Supervisor(Settings(**settings), Metrics("w"), engine)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


@asynccontextmanager
async def supervised(
    *, engine_slots: int | None = None, **settings: Any
) -> AsyncIterator[Supervisor]:
    """`engine_slots`: slots of the engine, if they differ from the settings."""
    async with unstarted(**settings) as supervisor:
        engine = Settings(**settings).engine
        engine = replace(engine, slots=engine_slots or engine.slots)
        await supervisor.start(structs.replace(CONFIG, engine=engine))
        yield supervisor


async def kill_engine(supervisor: Supervisor) -> None:
    """Kill the engine, and wait until a new one is being started."""
    os.kill(engine_pid(supervisor), signal.SIGKILL)
    await until(lambda: supervisor.state == "recovering")


def engine_pid(supervisor: Supervisor) -> int:
    """Process id of the current engine, or of the last one."""
    assert supervisor.info is not None
    return supervisor.info.pid


def request(order: str, job_id: str = "j", **fields: Any) -> InferenceRequest:
    return InferenceRequest(job_id, order, Sampling(seed=7), max_tokens=8, **fields)


async def all_of(job: Job) -> list[StreamEvent]:
    return [event for frame in [f async for f in job.inbox] for event in frame]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def failure_of(work: Awaitable[object]) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        await work
    return caught.value
