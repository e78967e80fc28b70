"""Fixtures for whole-process tests: a real worker on the bundled model, and more on demand."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.skips import NoSkips
from tests.support.held import engines_held_by
from tests.support.made import shared_folder
from tests.support.worker import PATIENCE_S, WorkerProcess

LONG_TIMEOUT_S = 3600
OFFLINE = "HF_HUB_OFFLINE"
# How long an example takes depends on the machine and its other work, not on the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="fail for a skip that tests/skips.py does not allow"
    )


def pytest_configure(config: pytest.Config) -> None:
    shared_folder()
    # After `&` or `nohup` these are ignored. Commands that tests send them to would inherit
    # that and ignore them, too.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, lambda *_: None),
    ):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    # rich takes a third of a second to render a traceback.
    structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
    if config.getoption("--no-skips"):
        config.pluginmanager.register(NoSkips())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests live until the end, so keep garbage collections, at 0.3 s each, from
    visiting them."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


class StartWorker(Protocol):
    """`start_worker("--slots", "2", env={…})` → a ready worker, stopped when the test ends.

    The engines of a worker that `can_be_held` wait while its file `hold` exists."""

    def __call__(
        self,
        *flags: str,
        env: Mapping[str, str] | None = None,
        backend: str = "cpu",
        command: Sequence[str] | None = None,
        wait_ready: bool = True,
        cache_dir: Path | None = None,
        can_be_held: bool = False,
    ) -> WorkerProcess: ...


@pytest.fixture(scope="session", autouse=True)
def one_certificate_store() -> Iterator[None]:
    """One store for all HTTP clients of the tests, because loading it takes 50 ms of CPU time
    each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    """Late answers of a busy machine are no fault, but httpx gives up after five seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, name, PATIENCE_S)
        yield


@pytest.fixture
def anyio_backend() -> str:
    """anyio's pytest plug-in runs coroutine tests."""
    return "asyncio"


@pytest.fixture(autouse=True)
def logs_of_its_own() -> Iterator[None]:
    """Restore the log defaults after a test that runs a command in this process."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


@pytest.fixture(autouse=True)
def downloads_of_its_own() -> Iterator[None]:
    """Restore the user's setting after a test that runs the doctor, which turns downloads off."""
    before = os.environ.get(OFFLINE)
    yield
    os.environ.pop(OFFLINE, None)
    if before is not None:
        os.environ[OFFLINE] = before


@pytest.fixture(scope="session")
def warm_cache() -> Path:
    """One cache folder per run, so that the bundled model is converted once."""
    folder = shared_folder() / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def worker(warm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """The worker that most tests share: `llorch-cpu` on the bundled model, 16 slots.

    It computes on one thread: two that wait for each other at every layer take three times the
    CPU time, and are very slow on a busy machine. Workers that `chat` starts have the default,
    which is the CPU budget.
    """
    folder = tmp_path_factory.mktemp("worker")
    running = WorkerProcess.start(
        *("--slots", "16", "--threads", "1"),
        folder=folder,
        cache_dir=warm_cache,
        env=engines_held_by(folder / "hold"),
    )
    yield running
    assert running.stop() == 0, running.stderr[-4000:]


@contextmanager
def starting(folder: Path, warm_cache: Path, *, ends_well: bool) -> Iterator[StartWorker]:
    started: list[WorkerProcess] = []
    numbers = itertools.count()

    def start(
        *flags: str,
        env: Mapping[str, str] | None = None,
        cache_dir: Path | None = None,
        can_be_held: bool = False,
        **options: Any,
    ) -> WorkerProcess:
        home = folder / f"worker-{next(numbers)}"
        home.mkdir()
        held = engines_held_by(home / "hold") if can_be_held else {}
        running = WorkerProcess.start(
            *flags,
            folder=home,
            cache_dir=cache_dir or warm_cache,
            env={"LLORCH_THREADS": "1", **held, **(env or {})},
            **options,
        )
        started.append(running)
        return running

    try:
        yield start
        for running in started if ends_well else ():
            assert running.stop() == 0, running.stderr[-4000:]
    finally:
        for running in started:
            running.kill()


@pytest.fixture
def start_worker(warm_cache: Path, tmp_path: Path) -> Iterator[StartWorker]:
    """A factory of workers with their own flags and variables, also on one thread."""
    with starting(tmp_path, warm_cache, ends_well=False) as start:
        yield start


@pytest.fixture(scope="module")
def share_worker(
    warm_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartWorker]:
    """Like `start_worker`, for workers that the tests of a file share: the same settings return the
    same worker, idle. They are stopped at the end, and must exit cleanly."""
    shared: dict[str, WorkerProcess] = {}
    with starting(tmp_path_factory.mktemp("shared"), warm_cache, ends_well=True) as start:

        def share(*flags: str, **options: Any) -> WorkerProcess:
            key = repr((flags, options))
            running = shared.get(key) or shared.setdefault(key, start(*flags, **options))
            running.wait_ready()
            running.wait_idle()
            return running

        yield share


@pytest.fixture(scope="session")
def counts() -> Iterator[list[str]]:
    """Lines to show at the end of the run: how many of how many worked."""
    lines: list[str] = []
    yield lines
    print()
    print(*lines, sep="\n")
