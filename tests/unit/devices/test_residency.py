"""The proof after the load: what passes, and what is refused even though it would run."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from builds import pins, sdist
from tests import ROOT
from tests.support.devices import other_architectures as other
from tests.support.devices import rpc
from tests.support.devices.fixtures import Given, MakeConfig
from tests.support.devices.loads import Loaded, loaded, planned
from tests.support.random_models import KINDS, Kind, random_model
from worker.devices import nvidia
from worker.devices.plan import placement
from worker.devices.plan.plan import Plan
from worker.devices.select import select_device
from worker.errors import ResidencyViolation
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.llama.pooled import PooledContext
from worker.models.gguf.header import read_header
from worker.wire.backends import BACKENDS
from worker.wire.engine_info import Buffer
from worker.wire.messages import DecodeOutcome


@pytest.fixture
def held(config: MakeConfig, gpu: int) -> Iterator[Loaded]:
    """A model on the device that stands in for a GPU."""
    with loaded(config("cuda", cuda_device=gpu)) as held:
        yield held


def refused(config: Given, **options: Any) -> ResidencyViolation:
    with loaded(config, **options) as held, pytest.raises(ResidencyViolation) as caught:
        held.prove()
    assert caught.value.exit_code == 5
    return caught.value


def packed(_path: Path) -> Path:
    return random_model("convolved", width=2, head=32, packed=True)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("model", ["windowed", "recurrent", packed, other.encoder])
def test_memory_with_other_layouts_is_planned_and_proven(
    model: Kind | Callable[[Path], Path],
    kv_type: str,
    backend: str,
    config: MakeConfig,
    gpu: int,
    tmp_path: Path,
) -> None:
    path = str(model(tmp_path / "m.gguf") if callable(model) else random_model(model, head=32))
    index = gpu if backend == "cuda" else 0
    source = config(backend, cuda_device=index, slots=3, context_length=256, model_path=path)
    source = source.but(kv_type=kv_type, flash_attention="on" if kv_type == "q8_0" else "auto")
    plan = planned(source)
    with loaded(source, mmap=False) as held:
        proof = held.prove()
    on_device = [b for b in proof.buffers if b.is_on_host == (backend == "cpu")]
    assert proof.resident and proof.layers_on_device == proof.layers_total == 5
    weights = sum(buffer.size_bytes for buffer in on_device if buffer.kind == "weights")
    assert plan.parts["weights"] == pytest.approx(weights, abs=32 * 1024)  # in units of 0.01 MiB
    later = 0
    if read_header(path).pooling is not None:  # its output buffer grows with the first long text
        output = size_of(b for b in proof.buffers if b.kind == "output")
        whole = plan.parts["output"] + plan.host_parts.get("output", 0)
        assert whole == 4 * 256 * (other.VOCABULARY + other.WIDTH) > output
        later = whole - output if backend == "cpu" else 0
    assert known_bytes(plan) - later == pytest.approx(size_of(on_device), rel=0.01)


def test_an_encoder_computes_a_text_as_long_as_its_context(
    config: MakeConfig, tmp_path: Path
) -> None:
    path = str(other.encoder(tmp_path / "model.gguf"))
    for length in random.Random(0).sample(range(1, other.CONTEXT), 16):
        source = config("cpu", model_path=path, context_length=length)
        assert planned(source).context_length == length
        with loaded(source, mmap=False) as held:
            (vector,) = PooledContext(held.context)([[1] * length])
        assert np.isfinite(vector).all(), length


def test_on_a_device_the_first_text_is_as_long_as_the_context(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(other.encoder(tmp_path / "model.gguf"))
    source = config("cpu", model_path=path, context_length=100)
    n_rows: list[int] = []

    def counted(decode: Callable[[Batch], DecodeOutcome]) -> Callable[[Batch], DecodeOutcome]:
        def decoding(batch: Batch) -> DecodeOutcome:
            n_rows.append(batch.n_rows)
            return decode(batch)

        return decoding

    with loaded(source, mmap=False) as held:
        for offload in (False, True):
            options = replace(held.context.options, offload=offload)
            with closing(Context(held.model, options)) as made:
                pool = PooledContext(made)
                monkeypatch.setattr(made, "decode", counted(made.decode))
                pool.warm_up([1, 2, 3], 100)
    assert n_rows == [3, 100]


def test_a_long_texts_workspace_is_planned(config: MakeConfig, tmp_path: Path) -> None:
    """Without flash attention, the scores are stored in a second type."""
    path = str(other.encoder(tmp_path / "model.gguf"))
    source = config("cpu", model_path=path, context_length=other.CONTEXT)
    source = source.but(flash_attention="off")
    plan, process = planned(source), psutil.Process()
    with loaded(source, mmap=False) as held:
        pool = PooledContext(held.context)
        before = process.memory_info().rss
        pool([[1] * other.CONTEXT])
        grown = process.memory_info().rss - before
    workspace = plan.parts["margin"] - BACKENDS["cpu"].margin_bytes
    print(f"{grown:,} of {plan.parts['compute'] + plan.parts['output'] + workspace:,}")
    assert workspace == plan.parts["compute"] // 2
    assert grown <= plan.parts["compute"] + plan.parts["output"] + workspace


def test_llama_cpp_makes_the_output_layer_first_for_the_architectures_that_are_named() -> None:
    first = set()
    for source in (sdist.unpacked(pins.pins()) / "vendor/llama.cpp/src/models").glob("*.cpp"):
        text = source.read_text()
        output = re.search(r"TOKEN_EMBD[^;]*TENSOR_DUPLICATED", text)
        embedding = re.search(r"tok_embd\s*=\s*create_tensor", text)
        if output and embedding and output.start() < embedding.start():
            first.add(source.stem)
    assert first == placement.OUTPUT_FIRST


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kv_types", "unified"), [(("f16", "f16"), False), (("q8_0", "iq4_nl"), True)]
)
def test_a_plan_is_exact_for_each_kind_of_memory(
    kv_types: tuple[str, str], unified: bool, kind: Kind, config: MakeConfig
) -> None:
    path = str(random_model(kind, head=32))
    source = config("cpu", slots=3, context_length=256, model_path=path, flash_attention="on")
    keys, values = kv_types
    source = source.but(kv_type_k=keys, kv_type_v=values, kv_unified=unified)
    plan = planned(source)
    with loaded(source, mmap=False) as held:
        proof = held.prove()
    assert known_bytes(plan) == pytest.approx(size_of(proof.buffers), rel=0.01)
    cells = [b for b in proof.buffers if b.kind in ("kv", "recurrent")]
    assert plan.parts["kv"] == pytest.approx(size_of(cells), rel=0.01)


def known_bytes(plan: Plan) -> int:
    """Return the planned memory that is allocated before the first request."""
    return plan.needed_bytes - plan.parts["margin"] - plan.parts.get("states", 0)


def size_of(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.size_bytes for buffer in buffers)


def test_a_cpu_worker_stays_off_a_gpu_that_is_there(config: MakeConfig, gpu: int) -> None:
    select_device(config("cuda", cuda_device=gpu).settings)
    with loaded(config("cpu")) as held:
        proof = held.prove()
    assert {b.device for b in proof.buffers} <= {"CPU", "CPU_Mapped", "CPU_REPACK", "AMX"}


def test_a_partial_load_is_refused(
    config: MakeConfig, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = config("cuda", "grouped-q8", cuda_device=gpu)
    native = library.load()
    really_load = native.llama_model_load_from_file

    def load_two_layers(path: bytes, params: Any) -> Any:
        params.n_gpu_layers = 2
        return really_load(path, params)

    monkeypatch.setattr(native, "llama_model_load_from_file", load_two_layers)
    error = refused(source)
    assert "layer 0 of 5 is on CPU, not on RPC0" in error.message
    assert any("of weights are on the host" in fault for fault in error.details["faults"])


def test_a_kv_cache_on_the_host_is_refused_and_its_operations_are_named(
    config: MakeConfig, gpu: int
) -> None:
    error = refused(config("cuda", cuda_device=gpu), offload_kv=False)
    assert "bytes of kv are on the host (CPU)" in error.message
    [fault] = [each for each in error.details["faults"] if "falls into" in each]
    assert "SET_ROWS" in fault and "run on the host, not on RPC0" in fault
    assert "MUL_MAT" not in fault, "of what is on the device nothing is named"


def test_a_model_on_a_second_device_is_refused(held: Loaded, small_gpu: int) -> None:
    second = select_device(held.source.but(cuda_device=(small_gpu,)).settings)
    with pytest.raises(ResidencyViolation, match="is on RPC0, not on RPC1") as caught:
        held.prove(second)
    assert any("weights are on another device" in f for f in caught.value.details["faults"])


def test_one_buffer_on_a_second_device_is_enough_to_refuse(held: Loaded) -> None:
    # In a real context llama.cpp would end the process, so the test changes the report.
    line = "llama_kv_cache: RPC1[127.0.0.1:9] KV buffer size =     0.25 MiB"
    held.context.load_log = (*held.context.load_log, line)
    with pytest.raises(ResidencyViolation, match="of kv are on another device"):
        held.prove()


def test_a_weight_on_the_host_is_refused(config: MakeConfig, gpu: int) -> None:
    source = config("cuda", cuda_device=gpu)
    cpu = next(d for d in library.devices() if d.kind == "cpu")
    host = library.ggml().ggml_backend_dev_buffer_type(cpu.handle)
    error = refused(source, tensor_placement=((r"blk\.0\.ffn_down", host),))
    assert "of weights are on the host" in error.message


def test_a_cpu_worker_with_layers_on_a_gpu_is_refused(config: MakeConfig, gpu: int) -> None:
    [device] = select_device(config("cuda", cuda_device=gpu).settings).devices
    source = config("cpu")
    error = refused(source, devices=(device,), mmap=False)
    assert "on RPC0, not on CPU" in error.message


def test_the_input_embedding_alone_may_stay_where_no_kernel_takes_it(
    config: MakeConfig, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test device supports every type, so its answer is replaced.
    monkeypatch.setattr(placement._Meta, "takes_rows", lambda *_: False)
    source = config("cuda", "grouped-q8", cuda_device=gpu, slots=2)
    with loaded(source) as held:
        proof = held.prove()
    on_host = [b for b in proof.buffers if b.kind == "weights" and b.device == "CPU"]
    assert len(on_host) == 1
    [reason] = [text for text in proof.allowed_host_buffers if text.startswith("weights")]
    assert "token_embd.weight alone" in reason


def test_a_host_buffer_larger_than_the_embedding_is_refused(
    config: MakeConfig, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement._Meta, "takes_rows", lambda *_: False)
    cpu = next(d for d in library.devices() if d.kind == "cpu")
    host = library.ggml().ggml_backend_dev_buffer_type(cpu.handle)
    source = config("cuda", "grouped-q8", cuda_device=gpu)
    error = refused(source, tensor_placement=((r"token_embd|blk\.0\.ffn_down", host),))
    # If the CPU repacks the matrix, the graph's splits reveal it first.
    assert "bytes are allowed there" in error.message or "compute graph" in error.message


@pytest.mark.parametrize(
    ("dropped", "fault"),
    [
        ("model buffer size", "of weights are accounted for"),
        ("KV buffer size", "of the KV cache are accounted for"),
        ("assigned to device", "does not say where the layers are"),
    ],
)
def test_missing_lines_of_the_log_are_refused(dropped: str, fault: str, held: Loaded) -> None:
    for each in (held.model, held.context):
        each.load_log = tuple(line for line in each.load_log if dropped not in line)
    with pytest.raises(ResidencyViolation, match=fault):
        held.prove()


def test_many_graph_splits_are_accepted_while_none_is_on_the_host(held: Loaded) -> None:
    log = [line.replace("splits = 1", "splits = 7") for line in held.context.load_log]
    held.context.load_log = tuple(log)
    assert held.prove().resident


def test_a_proof_names_what_is_watched_and_is_checked_at_once(
    held: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "processes", lambda _: {os.getpid(): 1})
    assert held.prove().watched == "process"
    (card,) = held.selected.cards
    with pytest.raises(ResidencyViolation, match="no longer the device"):
        held.prove(replace(held.selected, cards=(replace(card, total_bytes=1),)))


def test_an_empty_buffer_is_ignored(held: Loaded) -> None:
    line = "llama_kv_cache:        CPU KV buffer size =     0.00 MiB"
    held.context.load_log = (*held.context.load_log, line)
    assert all(buffer.size_bytes for buffer in held.prove().buffers)


def test_memory_that_cannot_be_locked_is_refused(config: MakeConfig) -> None:
    source = config("cpu", mlock=True)
    with loaded(source) as held:
        line = "warning: failed to mlock 4096-byte buffer (after previously locking 0 bytes): no"
        held.model.load_log = (*held.model.load_log, line)
        with pytest.raises(ResidencyViolation, match="--mlock is set"):
            held.prove()


def test_a_device_that_is_gone_is_a_loss_and_not_a_crash(models: dict[str, Path]) -> None:
    with rpc.serve() as (setting, device):
        holder = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.devices.holder", models["wide-heads"], setting],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdin is not None and holder.stdout is not None
        with holder:
            assert json.loads(holder.stdout.readline()) == "resident"
            print("again", file=holder.stdin, flush=True)
            assert json.loads(holder.stdout.readline()) == "resident"
            device.kill()
            device.wait()
            print("again", file=holder.stdin, flush=True)
            loss = json.loads(holder.stdout.readline())
            assert loss.startswith("The test device at")
            holder.kill()  # a regular exit would ask the device to free the model
