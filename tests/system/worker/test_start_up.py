"""Starts: the port first, the phases, and every failure with its code and one sentence."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests import ROOT
from tests.conftest import StartWorker
from tests.support import clock, with_engine
from tests.support.bundled import bundled_gguf
from tests.support.held import engines_held_by
from tests.support.worker import Exit, run_to_exit


def refused(exit: Exit, code: int, wire_code: str, *words: str) -> None:
    """Check the contract of a failed start: exit code, one JSON line, one clear sentence."""
    assert exit.code == code, exit.stderr[-2000:]
    assert "Traceback" not in exit.stderr
    assert exit.stdout == ""
    assert exit.failure["code"] == wire_code
    assert exit.failure["exit_code"] == code
    assert exit.sentence == f"llorch-cpu: {exit.failure['message']}"
    for word in words:
        assert word in exit.sentence


def test_a_missing_model_exits_with_3(warm_cache: Path) -> None:
    exit = run_to_exit("--port", "0", "--model", "/no/such/model.gguf", cache_dir=warm_cache)
    refused(exit, 3, "MODEL_LOAD_FAILED", "/no/such/model.gguf")


def test_a_port_in_use_exits_with_7(warm_cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        exit = run_to_exit("--port", port, cache_dir=warm_cache)
    refused(exit, 7, "PORT_IN_USE", port, "--port")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prot", "1"], ["--prot", "did you mean --port"]),
        (["--host", "no.such.host.invalid"], ["--host"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_invalid_settings_exit_with_2(warm_cache: Path, flags: list[str], words: list[str]) -> None:
    refused(run_to_exit(*flags, cache_dir=warm_cache), 2, "INVALID_CONFIG", *words)


def test_the_port_answers_first_and_phases_follow(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    """With an empty cache, so that the start includes the conversion."""
    before = time.monotonic()
    env = engines_held_by(hold := tmp_path / "hold")
    hold.touch()
    running = start_worker(wait_ready=False, cache_dir=tmp_path / "cold", env=env)
    health = running.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "healthy"
    assert clock.in_time(before, 30), "1 s on a quiet machine"
    first = running.get("/ready")
    assert first.status_code == 503
    assert first.json()["state"] == "loading" and first.json()["ready"] is False
    assert {"phase", "percent"} <= first.json().keys()
    refused_work = running.post("/execute", {"job_id": "early", "prompt": "Hi"})
    assert refused_work.status_code == 503 and refused_work.json()["code"] == "NOT_READY"
    for n_bytes in (1000, 5 << 20):  # whether it is a vision model is not known yet
        picture = {"url": f"data:image/png;base64,{'A' * n_bytes}"}
        content = [{"type": "image_url", "image_url": picture}]
        messages = [{"role": "user", "content": content}]
        refused_work = running.post("/v1/chat/completions", {"messages": messages})
        assert refused_work.status_code == 503, refused_work.text
    with httpx.stream("GET", f"{running.base_url}/v1/loading/progress", timeout=60) as response:
        hold.unlink()
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert len(lines) > 1
    running.wait_ready()
    assert running.get("/ready").json() == {"ready": True, "state": "idle"}
    assert running.stop() == 0


def test_a_native_assertion_reaches_the_user_in_its_words(warm_cache: Path) -> None:
    command = with_engine.command("tests.support.aborting_engine")
    ended = run_to_exit("--port", "0", cache_dir=warm_cache, command=command)
    assert ended.code == 3
    assert ended.sentence.endswith("llama.cpp gave the model up: GGML_ASSERT(n_dims > 0) failed.")


def test_an_engine_without_threads_is_not_blamed_on_the_model(warm_cache: Path) -> None:
    command = with_engine.command("tests.system.worker.threadless_engine")
    ended = run_to_exit("--port", "0", cache_dir=warm_cache, command=command)
    assert ended.code == 1 and "engine's start failed: The system allows" in ended.sentence
    assert ended.sentence.endswith("--pids-limit.")
    *lines, _ = ended.stderr.splitlines()
    assert lines and all(line.startswith("{") for line in lines), "the trace is in the log's form"


def test_an_engine_that_exits_in_its_start_is_not_blamed_on_the_model(warm_cache: Path) -> None:
    command = with_engine.command("tests.system.worker.exiting_engine")
    exit = run_to_exit("--port", "0", cache_dir=warm_cache, command=command)
    refused(exit, 1, "INFERENCE_FAILED", "ended in phase 'preflight': exit code 1")


@pytest.mark.skipif(sys.platform != "linux", reason="the words of its linker")
def test_a_damaged_llama_cpp_is_named_with_its_fault(warm_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "libllama.so").touch()
    env, model = {"LLAMA_CPP_LIB_PATH": str(tmp_path)}, ("--model", str(bundled_gguf()))
    exit = run_to_exit("--port", "0", *model, cache_dir=warm_cache, env=env)
    refused(exit, 4, "BACKEND_MISMATCH", str(tmp_path), "file too short")


def test_a_damaged_library_of_the_engine_is_named(warm_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no libfoo.so', path='/numpy/_core.so')")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    model = ("--model", str(bundled_gguf()))
    exit = run_to_exit("--port", "0", *model, cache_dir=warm_cache, env=env)
    assert exit.code == 1 and "engine's start failed" in exit.sentence


NO_THREAD = """\
import _thread, threading
def refuse(*_):
    raise RuntimeError("can't start new thread")
{} = refuse
from worker.cli import cpu
cpu()
"""


@pytest.mark.parametrize(
    "start", ["_thread.start_new_thread", "threading._start_new_thread"], ids=["own", "Python's"]
)
def test_a_start_without_threads_names_the_limit(warm_cache: Path, start: str) -> None:
    command = [sys.executable, "-c", NO_THREAD.format(start)]
    exit = run_to_exit("--port", "0", cache_dir=warm_cache, command=command)
    refused(exit, 1, "INFERENCE_FAILED", "no more threads", "ulimit -u", "--pids-limit")


NO_THREAD_AT_THE_END = """\
import threading
def start(thread, real=threading.Thread.start):
    if getattr(thread._target, "__name__", "") == "_do_shutdown":
        raise RuntimeError("can't start new thread")
    real(thread)
threading.Thread.start = start
from worker.cli import cpu
cpu()
"""


def test_an_error_is_reported_if_the_event_loop_has_no_thread_to_end_with(warm_cache: Path) -> None:
    command = [sys.executable, "-c", NO_THREAD_AT_THE_END]
    exit = run_to_exit("--port", "0", "--model", "nope", cache_dir=warm_cache, command=command)
    refused(exit, 3, "MODEL_LOAD_FAILED", "'nope' is not in")
