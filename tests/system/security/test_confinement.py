"""An engine that is taken over cannot break out: its attempts fail, and its work continues."""

from __future__ import annotations

import os
import re
import resource
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support import with_engine
from tests.support.worker import WorkerProcess
from tests.system.builds.test_door import OF_THE_TESTS
from tests.system.security.breaking_engine import ATTEMPTS, BREAKS_OUT
from tests.system.security.poisoned_engine import ABORTS_IN_LOOP
from tests.system.security.test_poison import POISONED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such walls")
BREAKING = "tests.system.security.breaking_engine"


def broken_out(worker: WorkerProcess) -> dict[tuple[str, str], int | None]:
    """Return the outcome of each attempt on each thread: the system's error, or `None`."""
    worker.execute("Once", seed=BREAKS_OUT, max_tokens=2)
    lines = worker.logs("breakout")
    return {(line["where"], line["attempt"]): line["refusal"] for line in lines}


def walls(worker: WorkerProcess) -> dict[str, Any]:
    found: dict[str, Any] = worker.get("/info").json()["engine"]["confinement"]
    return found


def holds(worker: WorkerProcess) -> None:
    missing = {name: wall["how"] for name, wall in walls(worker).items() if not wall["holds"]}
    if missing:
        pytest.skip(f"this kernel has not all walls: {missing}")


def breaks_out_in_vain(worker: WorkerProcess) -> None:
    holds(worker)
    found = broken_out(worker)
    assert set(found) == {(where, name) for where in ("intake", "loop") for name in ATTEMPTS}
    assert [attempt for attempt, refusal in found.items() if refusal is None] == []
    assert not (worker.folder / "written").exists()
    assert worker.execute("Once", max_tokens=3).end
    assert worker.logs("engine.crashed") == []
    assert worker.stop() == 0


def test_each_thread_is_bound_and_no_attempt_to_break_out_succeeds(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("--threads", "2", command=with_engine.command(BREAKING))
    holds(worker)
    tasks = list(Path(f"/proc/{worker.engine_pid}/task").glob("*/status"))
    assert len(tasks) > 3
    for task in tasks:
        status = dict(re.findall(r"^(\w+):\t(.*)$", task.read_text(), re.MULTILINE))
        assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1"), status["Name"]
    breaks_out_in_vain(worker)


def test_without_walls_the_attempts_succeed(start_worker: StartWorker) -> None:
    """Without walls, everything that a user may do succeeds; root may do all of it."""
    worker = start_worker("--no-confine", command=with_engine.command(BREAKING))
    assert {wall["how"] for wall in walls(worker).values()} == {"--no-confine"}
    refused = {name for (_, name), refusal in broken_out(worker).items() if refusal is not None}
    assert not refused - {name for name in ATTEMPTS if "the API" in name}
    assert (worker.folder / "written").exists()


def linked_venv(home: Path) -> Path:
    """The Python of a venv whose packages are links to those of this one."""
    venv.create(home, symlinks=True)
    (mine,) = home.glob("lib/python*/site-packages")
    packages = Path(sysconfig.get_path("purelib"))
    for folder, inner, names in os.walk(packages):
        inner[:] = [each for each in inner if not each.startswith(OF_THE_TESTS)]
        place = mine / Path(folder).relative_to(packages)
        place.mkdir(exist_ok=True)
        for name in names:
            (place / name).symlink_to(Path(folder, name))
    return home / "bin" / "python"


def test_a_confined_engine_finds_packages_that_are_symlinks(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    """Packages as installed by `uv --link-mode=symlink`."""
    python = linked_venv(tmp_path / "venv")
    worker = start_worker(command=[str(python), "-c", "from worker.cli import cpu; cpu()"])
    holds(worker)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert worker.answer("/v1/chat/completions", chat)["choices"]
    assert worker.logs("engine.crashed") == []


@pytest.mark.parametrize("confined", [True, False])
def test_a_crash_writes_a_core_only_without_walls(
    start_worker: StartWorker, confined: bool
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if Path("/proc/sys/kernel/core_pattern").read_text() != "core\n" or hard == 0:
        pytest.skip("this system writes its cores elsewhere, or none")
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        flags = [] if confined else ["--no-confine"]
        worker = start_worker("--crash-limit", "3", *flags, command=POISONED)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    body = {"prompt": "A secret", "seed": ABORTS_IN_LOOP, "max_tokens": 9, "ignore_eos": True}
    assert worker.post("/v1/inference", body).status_code == 500
    worker.wait_log("engine.crashed")
    assert any(worker.folder.glob("core*")) is not confined
