"""Whole workers: resident on a device that stands in for a GPU, or not started at all."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import StartWorker
from tests.support import clock
from tests.support.devices import rpc
from tests.support.pictures import picture, question
from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from tests.support.worker import Exit, WorkerProcess, run_to_exit

PROMPT = "Once upon a time"


def refused(*flags: str, cache: Path, command: list[str] | None = None) -> Exit:
    with clock.at_most(seconds=10):
        ended = run_to_exit("--port", "0", *flags, cache_dir=cache, backend="cuda", command=command)
    assert "Traceback" not in ended.stderr
    assert "worker.ready" not in ended.stderr
    assert ended.sentence.startswith("llorch-cuda: ")
    return ended


def test_a_gpu_worker_is_resident_and_has_the_cpus_text(
    start_worker: StartWorker, worker: WorkerProcess
) -> None:
    with rpc.serve(free_bytes=4 << 30) as (setting, _):
        on_gpu = start_worker("--slots", "4", command=rpc.cuda_command(setting))
        residency = on_gpu.get("/info").json()["residency"]
        assert residency["resident"] is True and residency["device"] == "RPC0"
        assert residency["layers_on_device"] == residency["layers_total"] == 5
        weights = [b for b in residency["buffers"] if b["kind"] in ("weights", "kv")]
        assert {b["device"].split("[")[0] for b in weights} == {"RPC0"}

        health = on_gpu.get("/health").json()
        assert health["resident"] is True and health["device"] == "RPC0"
        assert health["vram_bytes_used"] == residency["device_bytes"] > 0

        greedy = {"max_tokens": 24, "temperature": 0}
        assert on_gpu.execute(PROMPT, **greedy).text == worker.execute(PROMPT, **greedy).text
        assert on_gpu.stop() == 0


def test_the_projector_of_a_gpu_worker_is_on_the_gpu(start_worker: StartWorker) -> None:
    flags = ["--model", str(random_model("dense")), "--mmproj", str(random_projector("gemma3"))]
    with rpc.serve(free_bytes=4 << 30) as (setting, _):
        on_gpu = start_worker(*flags, "--slots", "2", command=rpc.cuda_command(setting))
        info = on_gpu.get("/info").json()
        size_bytes = info["engine"]["projector"]["size_bytes"]
        [its] = [b for b in info["residency"]["buffers"] if b["size_bytes"] == size_bytes]
        assert its["kind"] == "weights" and its["device"].startswith("RPC0")
        on_cpu = start_worker(*flags, "--slots", "2")
        greedy = question(picture(), max_tokens=8)
        answers = [each.post("/v1/chat/completions", greedy).json() for each in (on_gpu, on_cpu)]
        texts = [each["choices"][0]["message"]["content"] for each in answers]
        assert texts[0] == texts[1]
        assert on_gpu.stop() == 0


def test_a_worker_that_loses_its_gpu_exits_with_5(start_worker: StartWorker) -> None:
    with rpc.serve(free_bytes=4 << 30) as (setting, device):
        often = {"LOOK_SECONDS": "1"}
        lost = start_worker("--slots", "2", command=rpc.cuda_command(setting), env=often)
        device.kill()
        device.wait()
        line = lost.wait_log("residency.lost")
        assert "The test device at" in line["message"]
        assert lost.wait(60) == 5
        assert lost.stderr.strip().splitlines()[-1].startswith("llorch-cuda: The test device at")


def test_a_gpu_command_without_a_gpu_exits_with_4(warm_cache: Path) -> None:
    ended = refused(cache=warm_cache)
    assert ended.code == 4
    assert ended.failure["code"] == "BACKEND_MISMATCH"
    assert "Found: CPU (" in ended.sentence


def test_a_gpu_index_that_does_not_exist_exits_with_4(warm_cache: Path) -> None:
    with rpc.serve() as (setting, _):
        command = rpc.cuda_command(setting)
        ended = refused("--cuda-device", "7", cache=warm_cache, command=command)
    assert ended.code == 4
    assert "--cuda-device is 7" in ended.sentence and "0 = RPC0" in ended.sentence


def test_a_gpu_with_too_little_memory_exits_with_5(warm_cache: Path) -> None:
    with rpc.serve(free_bytes=600 << 20) as (setting, _):
        sizes = ("--slots", "64", "--context-length", "1024")
        ended = refused(*sizes, cache=warm_cache, command=rpc.cuda_command(setting))
        assert ended.code == 5
        failure = ended.failure
        assert failure["code"] == "INSUFFICIENT_VRAM"
        assert failure["needed_bytes"] > failure["available_bytes"] == 600 << 20
        assert failure["parts"]["kv"] > 0
        fitting = str(failure["largest_slots"])
        assert f"--slots {fitting} with 1024 tokens each" in ended.sentence
