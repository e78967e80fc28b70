"""The whole worker on a GPU with limited memory: correct texts, cancels, and dying engines."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import sse, with_engine
from tests.support.pool_manager import serving
from tests.support.worker import WorkerProcess, run_to_exit, until
from tests.system.security.test_confinement import BREAKING, breaks_out_in_vain
from tests.system.vulkan.conftest import PATIENT, SHADER_SECONDS, StartOnCards
from tests.system.worker.test_main_job import CASES, case_name
from tools import survival
from tools.gpu.cards import Cards
from worker.wire.backends import BACKENDS

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

N_STREAMS, N_TOKENS = 16, 40
STALL_SECONDS = 40
MARGIN_BYTES = BACKENDS["vulkan"].margin_bytes
SHAPE = ("--slots", "16", "--context-length", "1024")
PROMPTS = [survival.prompt(f"{name} {n}") for n in (1, 2) for name in survival.NAMES]


@pytest.fixture(scope="module")
def worker(start: StartOnCards) -> WorkerProcess:
    return start("discrete:500", *SHAPE, *PATIENT)


def test_no_attempt_to_break_out_of_the_engine_succeeds(start: StartOnCards) -> None:
    """The driver has opened its sockets by then."""
    breaks_out_in_vain(
        start("discrete:500", *PATIENT, command=with_engine.command(BREAKING, "vulkan"))
    )


@pytest.fixture(scope="module")
def alone(worker: WorkerProcess) -> dict[str, survival.Alone]:
    return {each: survival.alone(worker, each, N_TOKENS) for each in PROMPTS}


def test_the_whole_model_is_on_the_card(worker: WorkerProcess) -> None:
    health = worker.get("/health").json()
    assert health["resident"] is True and health["device"] == "Vulkan0"
    assert health["vram_bytes_used"] <= 500 << 20


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_greedy_text_is_the_cpus(worker: WorkerProcess, case: dict[str, Any]) -> None:
    prompt, ids = case.get("prompt") or case["rendered"], case["token_ids"]
    stream = worker.execute(prompt, temperature=0, max_tokens=len(ids) + 1)
    if case["smallest_margin"] > survival.DEVICE_ROUNDING:
        assert stream.ids == ids and stream.text == case["text"]
    else:
        assert stream.ids[:4] == ids[:4]


def test_sixteen_streams_say_what_they_say_alone(
    worker: WorkerProcess, alone: dict[str, survival.Alone]
) -> None:
    texts = at_once(worker)
    assert_as_alone(texts, alone)


def test_a_cancelled_stream_ends_and_gives_its_cells_back(worker: WorkerProcess) -> None:
    fields: dict[str, Any] = {"job_id": "cancelled", "max_tokens": 900, "ignore_eos": True}
    with worker.streaming(PROMPTS[0], **fields) as response:
        chunks = response.iter_raw()
        got = [next(chunks), next(chunks), next(chunks)]
        assert worker.post("/cancel", {"job_id": "cancelled"}).status_code == 202
        got += list(chunks)
    assert sse.collect(got).error["code"] == "CANCELLED"
    worker.wait_idle()
    worker.wait_for_free_cells()


def test_a_disconnect_gives_the_cells_back(worker: WorkerProcess) -> None:
    with worker.streaming(PROMPTS[0], max_tokens=900, ignore_eos=True) as response:
        next(response.iter_raw())
    worker.wait_idle()
    worker.wait_for_free_cells()


@pytest.fixture(scope="module")
def mortal(
    start: StartOnCards, worker: WorkerProcess, alone: dict[str, survival.Alone]
) -> WorkerProcess:
    """A worker with a short stall timeout, because all shaders are compiled by now. Its card has no
    room for a second engine."""
    at_once(worker)
    return start("discrete:500", *SHAPE, "--stall-timeout", str(STALL_SECONDS))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_after_the_engine_was(
    number: signal.Signals, mortal: WorkerProcess, alone: dict[str, survival.Alone]
) -> None:
    worker = mortal
    before, used = worker.engine_pid, worker.get("/health").json()["vram_bytes_used"]
    flowing = threading.Semaphore(0)

    def hit() -> None:
        for _ in PROMPTS:
            assert flowing.acquire(timeout=120)
        os.kill(before, number)

    with ThreadPoolExecutor(1) as pool:
        killer = pool.submit(hit)
        texts = at_once(worker, lambda: flowing.release())
        killer.result()
    until(
        lambda: worker.engine_pid != before, lambda: worker.stderr[-2000:], seconds=SHADER_SECONDS
    )
    assert_as_alone(texts, alone)
    worker.wait_ready()
    health = worker.get("/health").json()
    assert health["resident"] is True and health["vram_bytes_used"] == used


@pytest.mark.parametrize("for_good", [False, True], ids=["for a while", "for good"])
def test_memory_that_is_gone_while_a_prompt_needs_it_ends_the_engine(
    for_good: bool, tmp_path: Path, start: StartOnCards
) -> None:
    """For the quantised cells of a long prompt the driver's library allocates memory when it
    computes, and ends the process if there is none, like CUDA's."""
    cards = Cards("discrete:500", tmp_path / "cards")
    flags = ("--slots", "2", "--kv-type", "q8_0", "--prefill-budget", "512", "--crash-limit", "3")
    worker = start(cards, *flags, *PATIENT)
    greedy = {"max_tokens": 8, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        with cards.full():
            answer = pool.submit(worker.execute, PROMPTS[0] + " and the fox" * 190, **greedy)
            until(
                lambda: len(worker.logs("engine.crashed")) > 1,
                lambda: worker.stderr[-2000:],
                seconds=SHADER_SECONDS,
            )
            first, second = worker.logs("engine.crashed")[:2]
            assert first["how"] == "killed by SIGABRT"
            assert "does not fit on Vulkan0" in second["error"]
            assert "ErrorOutOfDeviceMemory" in worker.stderr, "the log has the driver's words"
            lacking = re.search(r"memory allocation of size (\d+) failed", worker.stderr)
            beyond = worker.logs("engine.plan")[0]["parts"]["margin"] - MARGIN_BYTES
            assert lacking is not None and 0 < int(lacking[1]) <= beyond, "it was planned"
            if for_good:
                assert worker.wait(SHADER_SECONDS) == 8
                assert "last: The model does not fit on Vulkan0" in worker.stderr.splitlines()[-1]
                assert answer.result().error["code"] == "ENGINE_CRASHED"
                return
            health = worker.get("/health").json()
            assert health["state"] == "recovering" and health["resident"] is False
            assert worker.get("/ready").status_code == 503
        assert answer.result(SHADER_SECONDS).end["engine_restarts"] == 1
    assert worker.execute(PROMPTS[0], **greedy).end["tokens_out"] == 8
    assert worker.get("/health").json()["resident"] is True


def test_a_start_that_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, start: StartOnCards
) -> None:
    cards = Cards("discrete:290", tmp_path / "cards")
    left = run_to_exit(
        *("--port", "0", "--log-format", "json", "--slots", "64", "--context-length", "1024"),
        cache_dir=tmp_path,
        backend="vulkan",
        env=cards.environment(),
    )
    assert left.code == 5 and left.failure["code"] == "INSUFFICIENT_VRAM"
    assert "The model does not fit on Vulkan0" in left.sentence
    assert "What would fit: --slots" in left.sentence


def test_a_model_that_fits_on_two_cards_alone_is_served_by_them(
    tmp_path: Path, start: StartOnCards
) -> None:
    cards = Cards("discrete:290", tmp_path / "cards")
    left = run_to_exit(
        "--port", "0", *SHAPE, cache_dir=tmp_path, backend="vulkan", env=cards.environment()
    )
    assert left.code == 5, left.stderr
    with serving() as manager:
        flags = (*SHAPE, *PATIENT, *manager.flags())
        both = start("discrete:290,discrete:290", "--vulkan-device", "0,1", *flags)
        manager.wait_for(n_callbacks=1)
        manager.wait_for_status("ready")
        assert manager.verdict() == []
        messages = [*manager.callbacks, *manager.beats]
    health = both.get("/health").json()
    assert health["resident"] is True and health["device"] == ["Vulkan0", "Vulkan1"]
    named = [each.payload["device"] for each in messages if each.payload["vram_bytes"]]
    assert len(named) > 1 and all(each == health["device"] for each in named)
    clear = [each for each in CASES if each["smallest_margin"] > 1]
    for case in clear:
        stream = both.execute(
            case["rendered"], temperature=0, max_tokens=len(case["token_ids"]) + 1
        )
        assert stream.text == case["text"]
    assert clear


def at_once(worker: WorkerProcess, on_token: Callable[[], object] = bool) -> list[list[int]]:
    """Return the texts of sixteen concurrent streams; `on_token` is called once in each stream."""

    def read(prompt: str) -> list[int]:
        fields: dict[str, Any] = survival.FIELDS | {"max_tokens": N_TOKENS}
        chunks = []
        with worker.streaming(prompt, **fields) as response:
            assert response.status_code == 200, response.read()
            for n, chunk in enumerate(response.iter_raw()):
                chunks.append(chunk)
                if n == 3:
                    on_token()
        stream = sse.collect(chunks)
        assert stream.end["tokens_out"] == N_TOKENS
        return stream.ids

    with ThreadPoolExecutor(N_STREAMS) as pool:
        return list(pool.map(read, PROMPTS))


def assert_as_alone(texts: list[list[int]], alone: dict[str, survival.Alone]) -> None:
    wrong = {
        prompt: ids
        for prompt, ids in zip(PROMPTS, texts, strict=True)
        if not alone[prompt].is_told_by(ids, survival.DEVICE_ROUNDING)
    }
    assert not wrong
