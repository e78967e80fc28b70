"""Stops: streams finish, new work is refused, and the process always exits in time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import StartWorker
from tests.support import clock
from tests.support.held import engines_held_by, mid_stream
from tests.support.worker import (
    WorkerProcess,
    environment,
    installed,
    json_lines,
    run_to_exit,
    until,
)

LONG = {"max_tokens": 1000, "ignore_eos": True}


@pytest.mark.parametrize(
    "how", ["SIGTERM", "SIGTERM to all", "SIGHUP to all", "SIGINT", "/shutdown"]
)
def test_running_streams_finish_and_new_work_is_refused(
    start_worker: StartWorker, how: str
) -> None:
    worker = start_worker(can_be_held=True)
    with mid_stream(worker, "One day", max_tokens=40, ignore_eos=True) as reading:
        if how == "/shutdown":
            assert worker.post("/shutdown", {}).status_code == 202
        else:
            name, _, to_all = how.partition(" ")
            for each in worker.children() if to_all else []:  # as systemd does by default
                each.send_signal(signal.Signals[name])
            worker.signal(signal.Signals[name])
        worker.wait_status("/ready", 503)
        assert worker.get("/ready").json()["state"] == "draining"
        refused = worker.post("/execute", {"job_id": "late", "prompt": "Hi"})
        assert refused.status_code == 503 and refused.json()["code"] == "SHUTTING_DOWN"
        if how == "/shutdown":  # the first signal after it cuts off nothing
            worker.signal(signal.SIGTERM)
            worker.wait_log("worker.signal")
        worker.hold.unlink()
        assert reading.rest().end["tokens_out"] == 40
    assert worker.wait() == 0
    events = [line["event"] for line in worker.logs()]
    assert events[-1] == "worker.stopped" and "engine.crashed" not in events


def test_a_stream_that_outlives_the_drain_gets_its_terminal_event(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("--drain-timeout", "0.5", can_be_held=True)
    with mid_stream(worker, "One day", **LONG) as reading:
        worker.freeze_engine()
        before = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert reading.rest().error["code"] == "SHUTTING_DOWN"
        assert worker.wait() == 0
    # On a quiet machine half a second plus the engine's end; at most 5.5 s by the process's clock.
    assert time.monotonic() - before > 0.4 and clock.in_time(before, 20), (
        "a wedged engine holds nothing up"
    )


IN_A_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_terminal_that_is_closed_lets_streams_finish(warm_cache: Path, tmp_path: Path) -> None:
    terminal, its_end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *installed(), "--port", "0", "--log-format", "json"],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env=environment(warm_cache, engines_held_by(tmp_path / "hold")),
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(its_end)
    try:
        log = b""
        while b"worker.ready" not in log:
            log += os.read(terminal, 4096)
        [listening] = [x for x in json_lines(log.decode()) if x["event"] == "worker.listening"]
        worker = WorkerProcess(process, tmp_path, listening["port"])
        with mid_stream(worker, "One day", max_tokens=40, ignore_eos=True) as reading:
            os.close(terminal)
            worker.wait_status("/ready", 503)
            worker.signal(signal.SIGHUP)  # a shell sends it before the system does
            worker.hold.unlink()
            assert reading.rest().end["tokens_out"] == 40
        assert worker.wait() == 0
    finally:
        process.kill()
        process.wait()


def test_a_worker_under_nohup_ignores_sighup(start_worker: StartWorker) -> None:
    worker = start_worker(command=["nohup", *installed()])
    worker.signal(signal.SIGHUP)
    assert worker.execute("Once", max_tokens=1).end["tokens_out"] == 1
    assert worker.stop() == 0


def test_a_second_signal_stops_now(start_worker: StartWorker) -> None:
    worker = start_worker("--drain-timeout", "60", can_be_held=True)
    with mid_stream(worker, "One day", **LONG) as reading:
        worker.freeze_engine()
        worker.signal(signal.SIGTERM)
        worker.wait_status("/ready", 503)
        before = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert clock.in_time(before, 20)
        assert reading.rest().error["code"] == "SHUTTING_DOWN"


SIGNALLED_EARLY = """\
import os, signal
from worker.supervisor.engine_process import EngineProcess
spawn = EngineProcess.spawn
def spawn_and_signal(engine):
    spawn(engine)
    os.kill(os.getpid(), signal.{how})
EngineProcess.spawn = spawn_and_signal
from worker.cli import cpu
cpu()
"""
"""The first engine is spawned before the worker has read its settings."""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_stop_before_the_port_is_open_is_clean_and_silent(warm_cache: Path, how: str) -> None:
    command = [sys.executable, "-c", SIGNALLED_EARLY.format(how=how)]
    exit = run_to_exit("--port", "0", cache_dir=warm_cache, command=command)
    assert (exit.code, exit.stderr) == (0, "")


def test_a_stop_while_loading_is_clean(start_worker: StartWorker) -> None:
    worker = start_worker(wait_ready=False)
    assert worker.stop() == 0
    assert worker.logs("worker.failed") == []


CONVERTER = """\
#!/bin/sh
trap '%s' TERM
echo $$ > converting
echo '{"phase": "as told", "percent": 1}'
while :; do sleep 0.1; done
"""
CONVERTS_BY = """\
import sys, types
from worker.models import conversion
conversion.sys = types.SimpleNamespace(executable=sys.argv.pop(1))
from worker.cli import cpu
cpu()
"""


def converting(start_worker: StartWorker, folder: Path, at_sigterm: str) -> WorkerProcess:
    (converter := folder / "converter").write_text(CONVERTER % at_sigterm)
    converter.chmod(0o700)
    command = [sys.executable, "-c", CONVERTS_BY, str(converter)]
    worker = start_worker(command=command, cache_dir=folder, wait_ready=False)
    # By then the worker follows it: a process that is still being started is killed with the start.
    until(lambda: worker.get("/ready").json()["phase"] == "as told", lambda: worker.stderr)
    return worker


def test_a_stop_waits_for_the_end_of_a_conversion(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = converting(start_worker, tmp_path, "sleep 1; rm converting; exit 1")
    assert worker.stop() == 0
    assert not (worker.folder / "converting").exists()


def test_a_second_signal_kills_a_conversion(start_worker: StartWorker, tmp_path: Path) -> None:
    worker = converting(start_worker, tmp_path, "echo asked > asked")
    worker.signal(signal.SIGTERM)
    until((worker.folder / "asked").exists, lambda: worker.stderr)
    before = time.monotonic()
    assert worker.stop() == 0 and clock.in_time(before, 2)
    assert not psutil.pid_exists(int((worker.folder / "converting").read_text()))


def test_signals_up_to_the_last_moment_change_no_exit_code(start_worker: StartWorker) -> None:
    process = start_worker().process
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert process.returncode == 0


def test_a_client_that_does_not_read_delays_no_stop(start_worker: StartWorker) -> None:
    worker = start_worker("--drain-timeout", "1")
    with worker.streaming("One day", **LONG):
        before = time.monotonic()
        assert worker.stop() == 0
        assert clock.in_time(before, 20)


LEAVES_SOON = """\
import threading
from worker import lifecycle
lifecycle.EXIT_MARGIN_SECONDS = 0.5
if {is_stuck}:  # for ever, in what the pool manager is told once the worker is ready
    lifecycle.Lifecycle._callback = lambda *_: threading.Event().wait()
from worker.cli import cpu
cpu()
"""


def leaving_soon(is_stuck: bool = False) -> list[str]:
    """The installed command, with another limit for a stop after its streams."""
    return [sys.executable, "-c", LEAVES_SOON.format(is_stuck=is_stuck)]


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process")
def test_a_stop_needs_no_new_memory(start_worker: StartWorker) -> None:
    """There may be none if memory or processes are short; the forced exit is prepared before."""
    worker = start_worker("--drain-timeout", "0.1", command=leaving_soon())
    taken = psutil.Process(worker.pid).memory_info().vms - (10 << 20)
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (taken, taken))
    worker.signal(signal.SIGTERM)
    worker.wait()


def is_stuck(worker: WorkerProcess) -> bool:
    try:
        with worker.client(timeout=0.5) as client:
            client.get("/ready")
    except httpx.TimeoutException:
        return True
    return False


def test_a_stop_needs_no_responsive_event_loop(start_worker: StartWorker) -> None:
    flags = ("--drain-timeout", "0.1", "--callback-url", "http://127.0.0.1:9/")
    worker = start_worker(*flags, command=leaving_soon(is_stuck=True), wait_ready=False)
    worker.wait_log("worker.ready")
    until(lambda: is_stuck(worker), lambda: "it answers all the time")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
