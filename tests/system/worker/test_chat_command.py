"""`llorch-cpu chat`, with a worker that runs and with one of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import StartWorker
from tests.support.certificate import own_certificate
from tests.support.ports import free_port
from tests.support.worker import environment, installed

FRANCE = "What is the capital of France?\n"


def chat(
    *flags: str, said: str, cache: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*installed(), "chat", *flags],
        input=said, capture_output=True, text=True, env=environment(cache, env), timeout=120,
    )  # fmt: skip


def port_of(base_url: str) -> str:
    return base_url.rpartition(":")[2]


def test_it_talks_to_the_running_worker(start_worker: StartWorker, tmp_path: Path) -> None:
    """Two turns of one conversation: the second goes on from the first one's cells."""
    worker = start_worker()
    said = "What is 3 plus 4? " * 6 + "\nWhat is 2 plus 2?\n"
    port = port_of(worker.base_url)
    done = chat("--port", port, "--json", said=said, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["content"] and first["finish_reason"] == "stop"
    assert second["timings"]["cache_n"] > 0
    plain = chat("--port", port, said=FRANCE, cache=tmp_path)
    assert "Paris" in plain.stdout and "tokens/s" in plain.stdout


def test_it_starts_a_worker_where_none_runs(warm_cache: Path) -> None:
    port = str(free_port())
    done = chat("--port", port, "--json", said=FRANCE, cache=warm_cache)
    assert "Paris" in json.loads(done.stdout)["content"], done.stderr


def test_a_token_is_sent_and_its_lack_is_a_sentence(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    env = {"LLORCH_WORKER_TOKEN": "sesame"}
    worker = start_worker(env=env)
    flags = ("--port", port_of(worker.base_url), "--json")
    assert chat(*flags, said=FRANCE, cache=tmp_path, env=env).returncode == 0
    refused = chat(*flags, said=FRANCE, cache=tmp_path)
    assert refused.returncode == 1
    assert "token" in refused.stderr.splitlines()[-1] and "Traceback" not in refused.stderr


def test_a_worker_with_a_certificate_is_asked_over_https(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    file = str(own_certificate(tmp_path))
    certificate = ("--ssl-certfile", file, "--ssl-keyfile", file)
    worker = start_worker(*certificate, wait_ready=False)
    worker.wait_log("worker.ready")
    port = str(worker.wait_log("worker.listening")["port"])
    done = chat("--port", port, *certificate, "--json", said=FRANCE, cache=tmp_path)
    assert "Paris" in json.loads(done.stdout)["content"], done.stderr


@pytest.mark.timeout(120)
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_talk(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*installed(), "chat", "--port", port_of(worker.base_url)],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment(tmp_path, {"TERM": "dumb"}),
    )  # fmt: skip
    os.close(theirs)
    seen = b""

    def until_seen(wanted: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while wanted not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(ours, 4096)
        seen = seen.partition(wanted)[2]

    try:
        until_seen(b">>> ")
        os.write(ours, FRANCE.encode())
        until_seen(b"Paris")
        until_seen(b"tokens/s")
        until_seen(b">>> ")
        os.write(ours, b"Tell me a long story about a fox and a stone and a river.\n")
        until_seen(b"river.")
        until_seen(b"\n")
        process.send_signal(signal.SIGINT)
        until_seen(b">>> ")
        worker.wait_idle(60)
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
