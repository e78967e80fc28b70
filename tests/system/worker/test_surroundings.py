"""What happens around a worker: disks fill up, logs lose their reader, clocks jump."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import StartWorker
from tests.support import sse
from tests.support.pool_manager import serving
from tests.support.ports import free_port
from tests.support.worker import environment, installed, json_lines, run_to_exit, until
from tests.unit.observability.test_logs import unread


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def story(url: str, job_id: str) -> sse.Stream:
    body: dict[str, Any] = {"job_id": job_id, "prompt": "Once upon a time", "max_tokens": 20}
    body["ignore_eos"] = True  # so that there is text
    with httpx.stream("POST", f"{url}/execute", json=body, trust_env=False, timeout=60) as response:
        return sse.collect(response.iter_raw())


@contextmanager
def worker_logging_to(stderr: Any, stdout: Any, cache_dir: Path) -> Iterator[tuple[Any, str]]:
    port = free_port()
    process = subprocess.Popen(
        [*installed(), "--port", str(port), "--log-level", "debug"],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment(cache_dir, {"LLORCH_THREADS": "1"}),
        cwd=cache_dir,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(60)


def test_a_log_whose_reader_left(warm_cache: Path) -> None:
    reader, writer = os.pipe()
    with worker_logging_to(writer, writer, warm_cache) as (process, url):
        os.close(writer)
        assert os.read(reader, 100), "it does log"
        os.close(reader)
        until(lambda: is_ready(url), 60, lambda: f"exit code {process.poll()}")
        assert story(url, "a").end["tokens_out"] >= 1
        assert httpx.post(f"{url}/shutdown", json={}, trust_env=False).status_code == 202
        assert process.wait(60) == 0


def test_a_log_on_a_full_disk(warm_cache: Path) -> None:
    with open("/dev/full", "wb") as full:
        with worker_logging_to(full, full, warm_cache) as (process, url):
            until(lambda: is_ready(url), 60, lambda: f"exit code {process.poll()}")
            assert story(url, "a").end["tokens_out"] >= 1
            process.terminate()
            assert process.wait(60) == 0


def test_a_log_whose_reader_stops_reading(warm_cache: Path) -> None:
    """From its first line on."""
    reader, writer = unread("pipe")
    with worker_logging_to(writer, subprocess.DEVNULL, warm_cache) as (process, url):
        os.close(writer)
        until(lambda: is_ready(url), 60, lambda: f"exit code {process.poll()}")
        for number in range(5):  # each logs several lines
            assert story(url, f"{number}").end["tokens_out"] >= 1
        process.terminate()
        assert process.wait(60) == 0
    os.close(reader)


def test_a_full_disk_stops_the_conversion_with_a_sentence(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: it fails the same write."""
    cache = tmp_path / "cache"
    cache.mkdir()
    limited = ["sh", "-c", 'ulimit -f 2000; exec "$@"', "sh", *installed(), "--port", "0"]
    done = subprocess.run(
        limited, capture_output=True, env=environment(cache), cwd=tmp_path, timeout=120
    )
    stderr = done.stderr.decode()
    assert done.returncode in (3, 6), stderr[-2000:]
    assert "Traceback" not in stderr
    (failure,) = [line for line in json_lines(stderr) if line["event"] == "worker.failed"]
    assert stderr.strip().splitlines()[-1] == f"llorch-cpu: {failure['message']}"
    assert not [path for path in cache.rglob("*") if path.suffix == ".gguf"]
    assert not [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def preloadable(folder: Path, name: str) -> Path:
    """A library of `tests/support`, built for `LD_PRELOAD`."""
    if sys.platform != "linux":
        pytest.skip("LD_PRELOAD is Linux's")
    library = folder / f"{name}.so"
    source = Path(__file__).parents[2] / "support" / f"{name}.c"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or "cc"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


def test_a_stop_waits_for_no_resolver(start_worker: StartWorker, tmp_path: Path) -> None:
    """A name of the pool manager that nobody answers for: the system looks it up for half a
    minute, and the worker leaves meanwhile."""
    running = start_worker(
        *("--heartbeat-url", "http://manager.hangs/beats", "--heartbeat-interval", "0.2"),
        env={"LD_PRELOAD": str(preloadable(tmp_path, "hanging_resolver"))},
    )
    running.wait_log("heartbeat.failed")
    before = time.monotonic()
    assert running.stop() == 0
    assert time.monotonic() - before < 15, "2 s on a quiet machine"


def test_a_clock_that_jumps(start_worker: StartWorker, tmp_path: Path) -> None:
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


def test_standard_files_that_are_closed(warm_cache: Path) -> None:
    """As some process supervisors start their children."""
    port = free_port()
    closed = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *installed(), "--port", str(port)]
    process = subprocess.Popen(closed, env=environment(warm_cache), cwd=warm_cache)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: is_ready(url), 60, lambda: f"exit code {process.poll()}")
        assert story(url, "a").end["tokens_out"] >= 1
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)


def test_the_log_is_utf8_in_each_locale(start_worker: StartWorker) -> None:
    """The plan's reason has a times sign, which ASCII has not."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    worker = start_worker(env=ascii_only)
    lines = (worker.folder / "stderr").read_text("utf-8").splitlines()
    (plan,) = [json.loads(line) for line in lines if '"engine.plan"' in line]
    assert "×" in plan["kv_reason"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems need more files for a start")
def test_descriptors_that_do_not_suffice_for_an_engine(warm_cache: Path) -> None:
    limited = ["sh", "-c", 'ulimit -n 7; exec "$@"', "sh", *installed()]
    exit = run_to_exit("--port", "0", cache_dir=warm_cache, command=limited)
    assert exit.code == 1 and "Traceback" not in exit.stderr
    failure, sentence = exit.stderr.strip().splitlines()
    assert sentence == f"llorch-cpu: {json.loads(failure)['message']}"
    assert "engine process could not be started" in sentence and "Too many open" in sentence
