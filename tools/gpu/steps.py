"""The steps, in their order. Each returns its findings and raises if something is wrong."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from builds import pins, smoke
from tests import ROOT
from tests.support.worker import WorkerProcess, installed, run_to_exit, until
from tools import survival
from tools.bench.peer_build import STAMP, build_peers, installed_libraries
from tools.bench.servers import patient
from tools.gpu.machine import Bench

STORY = "Once upon a time, there was a brave fox named"
PROMPTS = [f"{STORY} number {number}," for number in range(16)]
SIDE_BY_SIDE = "worker,llama-server,limit"
GREEDY = {"temperature": 0, "max_tokens": 48}


def installed_wheel(bench: Bench) -> str:
    """The sources, the compiler and the GPUs of the llama.cpp build."""
    stamp = json.loads((installed_libraries() / STAMP).read_text("utf-8"))
    told = [stamp["llama_cpp_commit"][:9], stamp["compiler"], stamp.get("nvcc", "")]
    return ", ".join(filter(None, [*told, stamp["flags"].get("CMAKE_CUDA_ARCHITECTURES")]))


def build_llama_server(bench: Bench) -> str:
    peers = build_peers(pins.pins(), os.cpu_count() or 1, backend=bench.backend)
    return str(peers.folder)


def doctor(bench: Bench) -> str:
    command = [*installed(bench.backend), "doctor", *patient(bench.patience)]
    done = subprocess.run(command, capture_output=True, text=True)
    (bench.out / "doctor.txt").write_text(done.stdout + done.stderr, "utf-8")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    return "would start"


def first_tokens(bench: Bench) -> dict[str, float]:
    """Seconds of a start and of streams, before and after the driver has compiled their kernels.

    Streams of many lengths end one after another, so there are steps of each width.
    """
    found = {}
    for name in ("first", "second"):
        began = time.monotonic()
        with bench.worker("--slots", "16", "--stall-timeout", "3600") as worker:
            found[f"{name}_start_s"] = round(time.monotonic() - began, 1)
            began = time.monotonic()

            def read(n: int, worker: WorkerProcess = worker) -> None:
                worker.execute(PROMPTS[n], temperature=0, max_tokens=2 + 2 * n)

            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                list(pool.map(read, range(len(PROMPTS))))
            found[f"{name}_streams_s"] = round(time.monotonic() - began, 1)
    return found


def plan_and_memory(bench: Bench) -> dict[str, Any]:
    """The plan's total, and the additional memory in use while the worker runs, by the driver."""
    before = bench.used_bytes
    with bench.worker() as worker:
        resident = int(worker.get("/health").json()["vram_bytes_used"])
        during = bench.used_bytes
        assert worker.get("/health").json()["resident"] is True
    if before is None or during is None:
        return {"planned_bytes": resident, "driver": "no driver to ask"}
    found: dict[str, Any] = {"planned_bytes": resident, "driver_bytes": during - before}
    began = time.monotonic()

    def is_free() -> bool:
        return (bench.used_bytes or 0) - before < resident // 10

    until(
        is_free,
        lambda: "the driver says that the memory is still used",
        seconds=60 * bench.patience,
    )
    return found | {"free_again_s": round(time.monotonic() - began, 1)}


def confined(bench: Bench) -> dict[str, str]:
    """The engine's walls; checks that the driver computes inside and without them."""
    found = {}
    for flags in ((), ("--no-confine",)):
        with bench.worker(*flags) as worker:
            assert worker.execute(STORY, max_tokens=4).end
            walls = worker.get("/info").json()["engine"]["confinement"]
        found[" ".join(flags) or "default"] = ", ".join(
            f"{name}: {'' if wall['holds'] else 'no, '}{wall['how']}"
            for name, wall in walls.items()
        )
    return found


def must_not_fit(bench: Bench) -> str:
    """Check that more cells than any device can hold are refused."""
    flags = ("--slots", "256", "--context-length", "16000000")
    limit_s = 50 * bench.patience
    left = run_to_exit(*flags, cache_dir=bench.cache, backend=bench.backend, timeout_s=limit_s)
    is_refused = left.code == 5 or "KV cells are more than" in left.sentence
    assert is_refused, left.sentence
    return f"exit code {left.code}: {left.sentence}"


def greedy_text(bench: Bench) -> str:
    with bench.worker() as worker:
        text = worker.execute(STORY, **GREEDY).text
    if bench.backend == "cpu":
        (bench.out / "expected.json").write_text(json.dumps({"greedy": text}), "utf-8")
    return _as_expected(bench, text)


def _as_expected(bench: Bench, text: str) -> str:
    """Return how much of a text equals the CPU's; it must be at least the first half."""
    expected = bench.expected["greedy"]
    same = len(os.path.commonprefix([text, expected]))
    assert same >= len(expected) // 2, f"after {same} of {len(expected)} characters: {text!r}"
    return "the same" if text == expected else f"the same for {same} of {len(expected)} characters"


def streams_as_alone(bench: Bench) -> dict[str, int]:
    """How many of sixteen concurrent streams have the same text as alone.

    Rounding depends on the batch, so texts may differ only after a near tie.
    """
    n_tokens = GREEDY["max_tokens"]
    fields = survival.FIELDS | GREEDY
    with bench.worker("--slots", "16") as worker:
        alone = [survival.alone(worker, prompt, n_tokens) for prompt in PROMPTS]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda prompt: worker.execute(prompt, **fields).ids, PROMPTS))
    pairs = list(zip(alone, together, strict=True))
    told = sum(whole.is_told_by(ids, survival.DEVICE_ROUNDING) for whole, ids in pairs)
    assert told == len(PROMPTS), f"{len(PROMPTS) - told} differ where no rounding explains it"
    same = sum(whole.ids == ids for whole, ids in pairs)
    return {"same": same, "parted_at_a_near_tie": told - same}


def deterministic(bench: Bench) -> str:
    with bench.worker("--slots", "4") as worker:
        fields = {"temperature": 1, "seed": 7, "max_tokens": 48, "deterministic": True}
        first = worker.execute(STORY, **fields).ids
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            noise = [pool.submit(worker.execute, prompt, **GREEDY) for prompt in PROMPTS[:3]]
            second = worker.execute(STORY, **fields).ids
            for other in noise:
                other.result()
    assert first == second
    return f"{len(first)} tokens twice"


def draft_model(bench: Bench) -> dict[str, Any]:
    """The model is its own draft model: planned, resident, and right except for near ties."""
    with bench.worker("--no-mmap", "--draft", "tiny-model") as worker:
        text = worker.execute(STORY, **GREEDY).text
        info = worker.get("/info").json()
        drafted, accepted = (
            worker.metric(f"worker_engine_tokens_{each}") for each in ("drafted", "accepted")
        )
    assert info["engine"]["speculation"]["kind"] == "draft", info["engine"]["speculation"]
    _as_expected(bench, text)
    assert accepted >= 0.9 * drafted, f"{accepted} of {drafted} guesses were right"
    planned = info["engine"]["plan"]["draft"]
    return {"drafted": drafted, "accepted": accepted, "planned_bytes": planned}


def engine_comes_back(bench: Bench) -> dict[str, Any]:
    """Recovery after SIGKILL, and after a SIGSTOP that counts as a stall; memory is released."""
    found: dict[str, Any] = {}
    wait_s = 60 * bench.patience
    with bench.worker("--stall-timeout", str(10 * bench.patience)) as worker:
        before = bench.used_bytes
        for number in (signal.SIGKILL, signal.SIGSTOP):
            pid = worker.engine_pid
            began = time.monotonic()
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                _ask_in_vain(worker)
            until(
                lambda pid=pid: worker.engine_pid != pid,
                lambda: worker.stderr[-1000:],
                seconds=wait_s,
            )
            worker.wait_ready(wait_s)
            found[f"{number.name}_to_ready_s"] = round(time.monotonic() - began, 1)
        after = bench.used_bytes
    if before is not None and after is not None:
        found["memory_grown_bytes"] = after - before
    return found


def _ask_in_vain(worker: WorkerProcess) -> None:
    """Send a request that the stopped engine cannot answer: idle, it does not count as stalled."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(worker.execute, STORY, max_tokens=4)
    pool.shutdown(wait=False)


def step_profile(bench: Bench) -> str:
    """Where a step's time goes, and how much of it is spent on the host."""
    command = [*_measured(bench, "step_profile", 20 if bench.short else 200), *_large(bench)]
    if not bench.short:
        _kept(bench, "profile-drawn", [*command, "--temperature", "0.8"])
    return _kept(bench, "profile", command)


def device_sampling(bench: Bench) -> str:
    """Steps that sample on the host, as the worker does, and with llama.cpp's own samplers."""
    command = _measured(bench, "device_sampling", 5 if bench.short else 100)
    if bench.short:
        model = bench.cache / "bundled.gguf"
        smoke.convert_bundled(Path(sys.executable), model)
        command += ["--model", str(model)]
    return _kept(bench, "sampling", command)


def _measured(bench: Bench, module: str, n_steps: int) -> list[str]:
    streams = "1,16" if bench.short else "1,16,64"
    command = [sys.executable, "-m", f"tools.bench.{module}", "--backend", bench.backend]
    return [*command, "--streams", streams, "--steps", str(n_steps)]


def other_settings(bench: Bench) -> str:
    """One pool of cells, and larger steps, against the defaults, to check the latter."""
    loads = "streams1" if bench.short else "streams16,join"
    variants = ["--variant", "unified=--kv-unified"]
    variants += ["--variant", "large=--micro-batch 2048 --prefill-budget 2048"]
    variants += ["--variant", "middle=--micro-batch 1024 --prefill-budget 1024"]
    return _table(bench, "settings", "--only", "worker", *variants, *_large(bench), loads=loads)


def speculation(bench: Bench) -> str:
    """Guesses by a draft model that is always right, and no guesses, against the default lookup."""
    loads = "guessed1" if bench.short else "guessed1,guessed4,guessed16"
    variants = ["--variant", "draft=--draft {draft}", "--variant", "plain=--speculate off"]
    return _table(bench, "speculation", "--only", "worker", *variants, *_large(bench), loads=loads)


def speed(bench: Bench) -> str:
    """The benchmark's table for an 8 B model; its figures are saved beside the report."""
    loads = "streams1"
    if not bench.short:
        loads += ",streams4,streams16,streams64,shared,join,open80,steady"
    return _table(bench, "bench", "--only", SIDE_BY_SIDE, *_large(bench), loads=loads)


def small_model(bench: Bench) -> str:
    """The same for 190 M parameters, where the host takes most of a step. A rehearsal omits
    cancels: their prompts are too long for a software device."""
    loads = "streams1"
    if not bench.short:
        loads += ",cancel,start,streams16,streams64,vocabulary,temperature"
    return _table(bench, "small", "--only", SIDE_BY_SIDE, loads=loads)


def _large(bench: Bench) -> list[str]:
    return [] if bench.short else ["--size", "large"]


def _table(bench: Bench, name: str, *flags: str, loads: str) -> str:
    command = [sys.executable, "-m", "tools.bench", "--backend", bench.backend, "--loads", loads]
    command += ["--quick"] if bench.short else ["--rounds", "1"]
    figures = bench.out / f"{name}.json"
    command += ["--patience", str(bench.patience), *flags, "--json", str(figures)]
    return _kept(bench, name, command)


def _kept(bench: Bench, name: str, command: list[str]) -> str:
    written = bench.out / f"{name}.txt"
    with written.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            child.wait()
        except TimeoutError:
            child.send_signal(signal.SIGINT)  # so that it ends the servers that it started
            child.wait()
            raise
    text = written.read_text("utf-8")
    assert child.returncode == 0 and "|" in text, text[-1500:]
    return f"{name}.txt"
