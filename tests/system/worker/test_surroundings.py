"""The surroundings of a worker: logs and conversions fill the disk, logs lose their reader, clocks
jump."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support import sse
from tests.support.pool_manager import serving
from tests.support.ports import free_port
from tests.support.worker import WorkerProcess, environment, installed, run_to_exit, until
from tests.unit.observability.test_logs import unread
from worker.devices.cpu.budget import cpu_budget


def serves_and_stops(
    cache_dir: Path,
    command: Sequence[str] = (),
    meanwhile: Callable[[], object] = lambda: None,
    **files: Any,
) -> None:
    """Check that a worker with these standard files answers and exits cleanly; `meanwhile` is
    called once it has been started. Its port is chosen here, as it cannot be read from the log."""
    port = free_port()
    process = subprocess.Popen(
        [*(command or installed()), "--port", str(port), "--log-level", "debug"],
        **files,
        env=environment(cache_dir, {"LLORCH_THREADS": "1"}),
        cwd=cache_dir,
    )
    worker = WorkerProcess(process, cache_dir, port)
    try:
        meanwhile()
        until(worker.is_ready, lambda: f"exit code {process.poll()}")
        for _ in range(5):  # each logs several lines
            stream = worker.execute("Once upon a time", max_tokens=20, ignore_eos=True)
            assert stream.end["tokens_out"] == 20
        assert worker.stop() == 0
    finally:
        worker.kill()


def test_a_worker_serves_although_the_reader_of_its_log_left(warm_cache: Path) -> None:
    reader, writer = os.pipe()

    def leave() -> None:
        os.close(writer)
        assert os.read(reader, 100), "it does log"
        os.close(reader)

    serves_and_stops(warm_cache, meanwhile=leave, stdout=writer, stderr=writer)


def test_a_worker_serves_although_its_log_is_on_a_full_disk(warm_cache: Path) -> None:
    with open("/dev/full", "wb") as full:
        serves_and_stops(warm_cache, stdout=full, stderr=full)


def test_a_worker_serves_although_nobody_reads_its_log(warm_cache: Path) -> None:
    """From its first line on."""
    reader, writer = unread("pipe")
    serves_and_stops(
        warm_cache, meanwhile=lambda: os.close(writer), stdout=subprocess.DEVNULL, stderr=writer
    )
    os.close(reader)


def test_a_worker_serves_with_closed_standard_files(warm_cache: Path) -> None:
    """As some process supervisors start their children."""
    closed = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *installed()]
    serves_and_stops(warm_cache, closed)


NO_PRCTL = """\
from worker.confinement import libc
def refuse():
    raise PermissionError(1, "Operation not permitted")
libc.set_not_dumpable = refuse
from worker.cli import cpu
cpu()
"""


def test_a_worker_serves_if_core_dumps_cannot_be_forbidden(warm_cache: Path) -> None:
    serves_and_stops(warm_cache, [sys.executable, "-c", NO_PRCTL], stderr=subprocess.DEVNULL)


def test_a_worker_does_not_import_modules_of_its_working_folder(tmp_path: Path) -> None:
    """The worker is started in this folder, but its processes import their own modules."""
    (tmp_path / "worker").mkdir()
    for name in ("worker/__init__", "secrets", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(__file__)")
    serves_and_stops(tmp_path)  # its cache is empty, so the converter runs, too


def test_a_full_disk_stops_the_conversion_with_a_sentence(tmp_path: Path) -> None:
    """A limit on the size of files replaces the full disk, as the same write fails."""
    limited = ["sh", "-c", 'ulimit -f 2000; exec "$@"', "sh", *installed()]
    exit = run_to_exit("--port", "0", cache_dir=tmp_path, command=limited)
    assert exit.code == 3, exit.stderr[-2000:]
    assert "Traceback" not in exit.stderr
    assert exit.sentence == f"llorch-cpu: {exit.failure['message']}"
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in left if path.suffix == ".gguf" or path.stat().st_size > 4096]


def preloadable(folder: Path, name: str) -> Path:
    """A library of this folder, built for `LD_PRELOAD`."""
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD is Linux's")
    library = folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "cc"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


def test_a_stop_waits_for_no_resolver(start_worker: StartWorker, tmp_path: Path) -> None:
    """The name of the pool manager does not resolve: the system's lookup takes long, and the worker
    exits meanwhile."""
    running = start_worker(
        *("--heartbeat-url", "http://manager.hangs/beats", "--heartbeat-interval", "0.2"),
        env={"LD_PRELOAD": str(preloadable(tmp_path, "hanging_resolver"))},
    )
    running.wait_log("heartbeat.failed")
    assert running.stop() == 0


def test_a_jump_of_the_clock_changes_no_deadline_stall_or_heartbeat(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    clock_jump = preloadable(tmp_path, "clock_jump")
    setting = tmp_path / "offset"
    setting.write_text("0")
    with serving() as manager:
        running = start_worker(
            *manager.heartbeat_flags(),
            *("--stall-timeout", "60"),
            env={"LD_PRELOAD": str(clock_jump), "CLOCK_JUMP_FILE": str(setting)},
        )
        manager.wait_for_status("ready")
        is_set = 0
        for jump_s in (3 * 3600, -3 * 3600):
            deadline = {"X-Deadline": str(int((time.time() + is_set + 60) * 1000))}
            body = {"job_id": f"j{jump_s}", "prompt": "One day", "ignore_eos": True}
            with running.client() as client:
                long = body | {"max_tokens": 300}
                with client.stream("POST", "/execute", json=long, headers=deadline) as response:
                    chunks = response.iter_raw()
                    seen = [next(chunks)]
                    setting.write_text(str(jump_s))
                    stream = sse.collect([*seen, *chunks])
                assert stream.end["tokens_out"] == 300, "its deadline had been taken before"
                is_set, n_beats = jump_s, len(manager.beats)
                manager.wait_for(n_beats=n_beats + 3)
                health = running.get("/health").json()
                assert 0 < health["uptime_seconds"] < 120
                late = {"X-Deadline": str(int((time.time() + is_set + 60) * 1000))}
                short = body | {"job_id": f"k{jump_s}", "max_tokens": 5}
                again = client.post("/execute", json=short, headers=late)
            assert again.status_code == 200, "a new deadline is read on the new clock"
            assert sse.collect([again.content]).end["tokens_out"] == 5
        assert running.is_ready() and running.logs("engine.stalled") == []
        assert manager.verdict() == []
        assert running.stop() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such masks")
@pytest.mark.parametrize(("flags", "bind"), [((), "true"), (("--threads", "2"), "false")])
def test_the_threads_follow_the_allowed_cpus_unless_they_are_set(
    start_worker: StartWorker, flags: tuple[str, ...], bind: str
) -> None:
    """As a cpuset does, for all its threads; a number that the user has set stays. OpenMP may bind
    the computing threads."""
    cpus = sorted(os.sched_getaffinity(0))
    worker = start_worker(*flags, env={"LLORCH_THREADS": "", "OMP_PROC_BIND": bind})
    n_threads = worker.get("/info").json()["engine"]["threads"]
    assert n_threads == (2 if flags else cpu_budget(None).threads)
    if n_threads == 1:
        pytest.skip("needs two cores")
    for allowed in (cpus[:1], cpus):
        for thread in Path(f"/proc/{worker.engine_pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), allowed)
        time.sleep(1.1)  # it checks once a second
        worker.execute("Once upon a time", max_tokens=8)
        engine = worker.get("/info").json()["engine"]
        changes = allowed != cpus and not flags
        assert engine["threads"] == (1 if changes else n_threads)
        assert not changes or "1 CPU allowed" in engine["threads_derivation"]
    logged = [each["threads"] for each in worker.logs("engine.cpu_budget")]
    assert logged == ([n_threads] if flags else [n_threads, 1, n_threads])
    assert worker.stop() == 0


def test_the_log_is_utf8_in_each_locale(start_worker: StartWorker) -> None:
    """The plan's reason has a times sign, which is not ASCII."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    worker = start_worker(env=ascii_only)
    (plan,) = worker.logs("engine.plan")
    assert "×" in plan["kv_reason"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems need more files for a start")
@pytest.mark.parametrize("n_files", [8, 12, 64])
def test_too_few_descriptors_stop_the_start_with_a_sentence(warm_cache: Path, n_files: int) -> None:
    limited = ["sh", "-c", f'ulimit -n {n_files}; exec "$@"', "sh", *installed()]
    exit = run_to_exit("--port", "0", cache_dir=warm_cache, command=limited)
    failure, sentence = exit.stderr.strip().splitlines()
    assert exit.code == json.loads(failure)["exit_code"] == 2
    assert sentence == f"llorch-cpu: {json.loads(failure)['message']}"
    assert f"{n_files} files open here (ulimit -n)" in sentence
