"""`llorch-cpu chat`, with a running worker and with its own."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import StartWorker
from tests.support.certificate import own_certificate
from tests.support.ports import free_port
from tests.support.worker import (
    PATIENCE_S,
    WorkerProcess,
    environment,
    installed,
    run_to_exit,
    until,
)

FRANCE = "What is the capital of France?\n"


def chat(
    *flags: str, typed: str, cache: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*installed(), "chat", *flags], input=typed, capture_output=True, text=True,
        env=environment(cache, env), timeout=PATIENCE_S,
    )  # fmt: skip


def test_chat_continues_a_conversation_with_the_running_worker(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    """Two turns of one conversation: the second continues from the cells of the first."""
    typed = "What is 3 plus 4? " * 6 + "\nWhat is 2 plus 2?\n"
    port = str(worker.port)
    done = chat("--port", port, "--json", typed=typed, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["content"] and first["finish_reason"] == "stop"
    assert second["timings"]["cache_n"] > 0
    typed = "/system Be kind.\n/etc/hosts\n"  # not a command: answered, as JSON
    last = chat("--port", port, "--json", typed=typed, cache=tmp_path)
    assert "content" in json.loads(last.stdout), last.stdout
    plain = chat("--port", port, typed=FRANCE, cache=tmp_path)
    assert "Paris" in plain.stdout and "tokens/s" in plain.stdout


def test_chat_without_standard_input_exits_silently(worker: WorkerProcess, tmp_path: Path) -> None:
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *installed()]
    exit = run_to_exit("chat", "--port", str(worker.port), cache_dir=tmp_path, command=closed)
    assert (exit.code, exit.stderr) == (0, "")


def test_chat_uses_https_and_the_token_and_names_the_variable_without_it(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    file = str(own_certificate(tmp_path))
    certificate = ("--ssl-certfile", file, "--ssl-keyfile", file)
    env = {"LLORCH_WORKER_TOKEN": "sesame"}
    worker = start_worker(*certificate, env=env, wait_ready=False)
    worker.wait_log("worker.ready")
    flags = ("--port", str(worker.port), *certificate, "--json")
    done = chat(*flags, typed=FRANCE, cache=tmp_path, env=env)
    assert "Paris" in json.loads(done.stdout)["content"], done.stderr
    refused = chat(*flags, typed=FRANCE, cache=tmp_path)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "LLORCH_WORKER_TOKEN" in refused.stderr.splitlines()[-1]


@contextlib.contextmanager
def at_a_terminal(
    port: int, cache: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int, Callable[[bytes], None]]]:
    """Yield the command, its terminal, and a function that waits for output."""
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        [*installed(), "chat", "--port", str(port)],
        stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True,
        env=environment(cache, {"TERM": "xterm"}),
    )  # fmt: skip
    os.close(its_end)
    seen = b""

    def until_seen(wanted: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(terminal, 4096)
        seen = seen.partition(wanted)[2]

    try:
        yield process, terminal, until_seen
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_control_characters_and_markup_of_a_worker_are_not_obeyed(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('never ' + messages[0].content) }}")
    flags = ("--served-model-name", "a[/model]", "--chat-template", str(template))
    worker = start_worker(*flags)
    with at_a_terminal(worker.port, tmp_path) as (_, terminal, until_seen):
        until_seen(b"a[/model]")
        until_seen(b">>> ")
        os.write(terminal, "say [/INST] \x9b2J\n".encode())
        until_seen(b"never say [/INST] \\x9b2J")
        until_seen(b">>> ")


def test_a_person_edits_pastes_interrupts_and_quits(worker: WorkerProcess, tmp_path: Path) -> None:
    with at_a_terminal(worker.port, tmp_path) as (process, terminal, until_seen):
        until_seen(b">>> ")
        os.write(terminal, FRANCE.encode())
        until_seen(b"Paris")
        until_seen(b"tokens/s")
        until_seen(b">>> ")
        # The earlier words, with another end.
        os.write(terminal, b"\x1b[A" + 7 * b"\x7f" + b"Italy?\n")
        until_seen(b"Rome")
        until_seen(b">>> ")
        os.write(terminal, b"\x1b[200~What is\n2 plus 2?\x1b[201~\n")  # two pasted lines
        until_seen(b"tokens/s")
        until_seen(b">>> ")
        n_before = worker.metric("worker_tokens_in_total")
        os.write(terminal, b"Tell me a long story about a fox and a stone and a river.\n")
        until_seen(b"river.")
        until(lambda: worker.metric("worker_tokens_in_total") > n_before, lambda: "not asked")
        process.send_signal(signal.SIGINT)
        until_seen(b">>> ")
        worker.wait_idle()
        os.write(terminal, b"\n")  # a Ctrl-C after the end of the answer is noticed by then
        until_seen(b">>> ")
        os.write(terminal, b"\x04")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("how", "code"), [(None, 0), ("SIGINT", 130), ("SIGKILL", -9)])
def test_the_worker_that_chat_starts_ends_with_it(
    how: str | None, code: int, warm_cache: Path
) -> None:
    """But not by a signal that a terminal sends to its process group. It starts one if a model is
    named or none is running; the input need not be text."""
    flags = ("--model", "tiny-model") if how else ("--port", str(free_port()))
    process = subprocess.Popen(
        [*installed(), "chat", *flags, "--json"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env=environment(warm_cache),
    )  # fmt: skip
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(FRANCE.encode() + b"Hi \xff\n")
        process.stdin.flush()
        assert "Paris" in json.loads(process.stdout.readline())["content"]
        assert json.loads(process.stdout.readline())["finish_reason"]
        (worker,) = psutil.Process(process.pid).children()
        assert os.getpgid(worker.pid) != os.getpgid(process.pid)
        if how is None:
            process.stdin.close()
        # Python handles a signal that comes just before a read only when the read returns.
        for _ in range(6 if how else 0):
            process.send_signal(signal.Signals[str(how)])
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        assert process.wait(PATIENCE_S) == code
    psutil.wait_procs([worker], PATIENCE_S)
    assert not worker.is_running()
