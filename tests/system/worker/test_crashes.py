"""The real engine process dies or stalls: what its users see, and how it recovers."""

from __future__ import annotations

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import psutil
import pytest

from tests.conftest import StartWorker
from tests.support import with_engine
from tests.support.held import holding, mid_stream
from tests.support.worker import WorkerProcess, until
from tools import survival

N_TOKENS = 150
LONG = {"max_tokens": N_TOKENS, "ignore_eos": True}


@pytest.fixture
def running(share_worker: StartWorker) -> WorkerProcess:
    """A worker for tests, which must exit cleanly."""
    return share_worker("--crash-limit", "100", can_be_held=True)


@pytest.fixture
def watched(share_worker: StartWorker) -> WorkerProcess:
    """A worker whose engine may stall only briefly."""
    return share_worker("--crash-limit", "100", "--stall-timeout", "2.5", can_be_held=True)


def test_after_the_renderer_was_killed_the_next_engine_answers(running: WorkerProcess) -> None:
    """As the OOM killer does. A confined engine cannot start another renderer."""
    first = running.engine_pid
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert running.post("/v1/chat/completions", chat).status_code == 200
    children = psutil.Process(first).children(recursive=True)
    program = "worker.engine.text.renderer_child"
    for child in [each for each in children if program in each.cmdline()]:
        child.kill()
    assert running.post("/v1/chat/completions", chat).status_code == 200
    assert running.engine_pid != first


@pytest.mark.parametrize(
    ("name", "meant"),
    [("SIGKILL", "by the kernel for lack of memory"), ("SIGILL", "this processor lacks")],
)
def test_the_log_explains_the_signal(running: WorkerProcess, name: str, meant: str) -> None:
    n_crashes = len(running.logs("engine.crashed"))
    running.kill_engine(signal.Signals[name])
    how = running.wait_log("engine.crashed", n_crashes + 1)["how"]
    assert how.startswith(f"killed by {name}: ") and how.endswith(meant)


def test_a_death_ends_no_stream(start_worker: StartWorker) -> None:
    running = start_worker(*survival.EXACT, can_be_held=True)
    first = running.engine_pid
    whole = survival.alone(running, "One day", LONG["max_tokens"])
    with mid_stream(running, "One day", **LONG, temperature=0) as reading:
        running.kill_engine(signal.SIGSEGV)
        running.hold.unlink()
        stream = reading.rest()
    assert stream.end["engine_restarts"] == 1
    assert stream.end["tokens_out"] == N_TOKENS and len(stream.ids) == len(whole.ids)
    assert whole.is_told_by(stream.ids)
    running.wait_ready()
    assert running.engine_pid != first
    assert "SIGSEGV" in running.wait_log("engine.crashed")["how"]
    assert running.execute("Once", max_tokens=5, ignore_eos=True).end["tokens_out"] >= 1
    (crash,) = running.get("/info").json()["engine_crashes"]
    assert "SIGSEGV" in crash["cause"] and crash["ready_seconds"] > 0
    assert abs(datetime.fromisoformat(crash["at"]).timestamp() - time.time()) < 60
    assert running.metric("worker_engine_crashes_total") == 1
    assert running.metric("worker_engine_respawns_total") == 1
    assert running.metric('worker_requests_total{outcome="success"}') == 4
    assert running.metric("worker_tokens_generated_total") == 3 * N_TOKENS + 5
    assert len(running.engines()) == 1
    assert running.stop() == 0


def test_with_survive_crashes_0_a_crash_ends_the_stream(start_worker: StartWorker) -> None:
    running = start_worker("--survive-crashes", "0", can_be_held=True)
    with mid_stream(running, "One day", **LONG) as reading:
        running.kill_engine()
        stream = reading.rest()
        assert stream.error["code"] == "ENGINE_CRASHED" and stream.error["retriable"] is True
        ready = running.get("/ready")
        assert ready.status_code == 503 and ready.json()["state"] == "recovering"
        assert running.get("/health").status_code == 200
        refused = running.post("/execute", {"job_id": "x", "prompt": "Hi"})
        assert refused.status_code == 503 and refused.json()["retriable"] is True
    running.wait_ready()
    assert running.stop() == 0


def test_a_crash_does_not_change_log_probabilities_and_schema(running: WorkerProcess) -> None:
    n_crashes = len(running.logs("engine.crashed"))
    item = {"type": "string", "minLength": 30}
    schema = {"type": "array", "items": item, "minItems": 12, "maxItems": 12}
    body = {
        "model": "tiny-model",
        "messages": [{"role": "user", "content": "Count to 4."}],
        "stream": True,
        "logprobs": True,
        "temperature": 0,
        "max_tokens": 900,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    text, n_logprobs, is_killed = "", 0, False
    with (
        holding(running.hold),
        running.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as r,
    ):
        for line in r.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                piece = choice["delta"].get("content") or ""
                text += piece
                if choice["logprobs"]:
                    n_logprobs += len("".join(e["token"] for e in choice["logprobs"]["content"]))
            if len(text) > 3 and not is_killed:
                is_killed = True
                running.kill_engine()
                running.hold.unlink()
    answer = json.loads(text)
    assert len(answer) == 12 and all(len(each) >= 30 for each in answer)
    assert n_logprobs == len(text), "a log-probability for each token, and none twice"
    assert len(running.logs("engine.crashed")) == n_crashes + 1


def test_a_failed_native_assertion_is_reported_in_its_words(start_worker: StartWorker) -> None:
    command = with_engine.command("tests.support.aborting_engine")
    running = start_worker(command=command, env={"LLAMA_ABORTS_FROM": "200"})
    assert running.execute("Once", max_tokens=3).end
    lost = running.execute("one " * 300, max_tokens=3)
    assert lost.error["code"] == "ENGINE_CRASHED"
    crash = running.get("/info").json()["engine_crashes"][0]
    assert crash["cause"] == "llama.cpp gave up: GGML_ASSERT(n_dims > 0) failed."
    assert "SIGABRT" in running.wait_log("engine.crashed")["how"]
    running.wait_ready()
    assert running.stop() == 0


def test_a_crash_loop_ends_the_worker(start_worker: StartWorker) -> None:
    running = start_worker("--crash-limit", "2")
    for _ in range(2):
        running.replace_engine()
    running.kill_engine()
    assert running.wait() == 8
    assert running.logs("worker.failed")[0]["code"] == "ENGINE_CRASH_LOOP"
    assert "3 times" in running.stderr.strip().splitlines()[-1]


def test_a_crash_loop_in_a_drain_exits_with_8(start_worker: StartWorker) -> None:
    running = start_worker("--crash-limit", "1", can_be_held=True)
    with mid_stream(running, "One day", **LONG) as reading:
        running.signal(signal.SIGTERM)
        running.wait_status("/ready", 503)
        for n in (1, 2):
            running.wait_log("engine.spawned", n)
            running.kill_engine()
        assert reading.rest().error["code"] == "ENGINE_CRASHED"
    assert running.wait() == 8


def test_a_stall_is_unhealthy_then_replaced(watched: WorkerProcess) -> None:
    running = watched
    first = running.engine_pid
    with mid_stream(running, "One day", **LONG) as reading:
        stopped_at = time.monotonic()
        running.freeze_engine()
        running.hold.unlink()
        assert running.get("/health").status_code == 200, "not yet"
        running.wait_status("/health", 503)
        # Not 2.5: on a busy machine the last step before the stop may be older than this.
        assert time.monotonic() - stopped_at >= 1.25
        stream = reading.rest()
    assert stream.end["engine_restarts"] == 1
    assert running.engine_pid != first and not psutil.pid_exists(first)
    assert running.wait_log("engine.stalled")["pid"] == first
    assert running.get("/health").status_code == 200


def test_idle_and_slow_but_moving_are_healthy(watched: WorkerProcess) -> None:
    """Slow: the engine gets a hundredth of a core, and a prompt of one batch takes longer than the
    timeout."""
    running, n_stalls = watched, len(watched.logs("engine.stalled"))
    time.sleep(3)
    assert running.get("/health").status_code == 200
    stop = threading.Event()
    slowing = threading.Thread(target=slow_down, args=(running.engine_pid, stop))
    slowing.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            words = " ".join(["One day the fox went to the lake."] * 45)
            job = pool.submit(running.execute, words, max_tokens=3, ignore_eos=True)
            statuses = set()
            while not job.done():
                statuses.add(running.get("/health").status_code)
                time.sleep(0.02)
            assert job.result().end["tokens_out"] == 3
    finally:
        stop.set()
        slowing.join()
    assert statuses == {200}
    assert len(running.logs("engine.stalled")) == n_stalls


def slow_down(pid: int, stop: threading.Event) -> None:
    """Let it run for 10 ms of CPU time, however long a busy machine takes for that."""
    engine = psutil.Process(pid)
    while not stop.is_set():
        engine.suspend()
        time.sleep(0.9)
        computed, until_s = sum(engine.cpu_times()[:2]), time.monotonic() + 1
        engine.resume()
        while sum(engine.cpu_times()[:2]) == computed and time.monotonic() < until_s:
            time.sleep(0.002)


def test_pauses_of_the_worker_are_not_a_stall_of_the_engine(watched: WorkerProcess) -> None:
    """Such as a sleeping laptop, a debugger, or a container that is paused repeatedly: they must
    not be blamed on the engine."""
    running, n_stalls = watched, len(watched.logs("engine.stalled"))
    with mid_stream(running, "One day", **LONG) as reading:
        for pause_s in (0.9, 0.9, 0.9, 0.9, 3.5):
            running.signal(signal.SIGSTOP)
            time.sleep(pause_s)
            running.signal(signal.SIGCONT)
            time.sleep(0.05)
        running.hold.unlink()
        stream = reading.rest()
    assert stream.end["tokens_out"] == N_TOKENS
    assert len(running.logs("engine.stalled")) == n_stalls


def test_no_engine_outlives_a_parent_that_was_killed(start_worker: StartWorker) -> None:
    """Not even a stopped one."""
    running = start_worker()
    (engine,), children = running.engines(), running.children()
    engine.suspend()
    running.kill()

    def are_gone() -> bool:
        running = [each for each in children if each.is_running()]
        return all(each.status() == psutil.STATUS_ZOMBIE for each in running)

    until(are_gone, lambda: f"{children}")
