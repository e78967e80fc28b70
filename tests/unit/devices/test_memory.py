"""Plans against real allocations, on the CPU and on the device that stands in for a GPU, and the
settings that a model cannot run with, such as a KV type."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.devices.fixtures import SHAPES, Given, MakeConfig
from tests.support.devices.loads import loaded, planned
from tests.support.random_adapters import random_adapter
from tests.support.random_models import KINDS, Kind, random_model
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan import memory, placement
from worker.devices.plan.cells import STATES_AHEAD, head_options
from worker.devices.plan.plan import Plan
from worker.devices.residency.load_report import parse
from worker.devices.select import select_device
from worker.errors import ConfigError
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.models.gguf.header import read_header
from worker.models.gguf.tensors import TensorEntry
from worker.wire.engine_info import Residency

SETTINGS: dict[str, dict[str, Any]] = {
    "one slot": {"slots": 1, "context_length": 512},
    "eight slots": {"slots": 8, "context_length": 1024},
    "one pool": {"slots": 4, "context_length": 2048, "kv_unified": True, "micro_batch": 128},
    "small cells": {
        "slots": 4,
        "context_length": 512,
        "kv_type": "q8_0",
        "flash_attention": "on",
    },
}


def proven(source: Given, plan: Plan) -> Residency:
    """Load for real; everything is on the device, except for what must be on the host."""
    with loaded(source, plan, mmap=bool(source.settings.mmap)) as held:
        proof, is_gpu = held.prove(), held.selected.is_gpu
    assert proof.resident
    assert proof.device == ("RPC0" if is_gpu else "CPU")
    n_layers = read_header(source.model_path).block_count or 0
    assert proof.layers_on_device == proof.layers_total == n_layers + 1
    reasons = proof.allowed_host_buffers
    assert bool(reasons) == is_gpu and all("host" in reason for reason in reasons)
    assert not any("weights" in reason for reason in reasons)
    return proof


def allocated(proof: Residency) -> dict[str, int]:
    """Return llama.cpp's report about the device's, or a CPU's, memory, by part."""
    parts: Counter[str] = Counter()
    for buffer in proof.buffers:
        if buffer.is_on_host == (proof.device == "CPU"):
            parts[buffer.kind] += buffer.size_bytes
    return dict(parts)


def decoded(context: Context) -> list[str]:
    """Return llama.cpp's log while it computes a whole micro-batch."""
    batch = Batch(context.options.n_batch)
    batch.add(0, 0, [1] * context.options.n_ubatch, logits=True)
    with library.log.capture() as lines:
        assert context.decode(batch) == "ok"
    return lines


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_plan_equals_the_allocation(
    backend: str, shape: str, settings: str, config: MakeConfig, gpu: int
) -> None:
    index = gpu if backend == "cuda" else 0
    source = config(backend, shape, cuda_device=index, mmap=False, **SETTINGS[settings])
    plan = planned(source)
    actual = allocated(proven(source, plan))
    for part in ("weights", "kv", "compute"):
        assert plan.parts[part] == pytest.approx(actual[part], rel=0.05), part
    total = plan.needed_bytes - plan.parts["margin"] - plan.parts.get("states", 0)
    assert total == pytest.approx(sum(actual.values()), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "flash_attention"), [*((kind, "on") for kind in KINDS), ("dense", "off")]
)
def test_the_memory_to_compute_adapters_is_planned(
    kind: Kind, flash_attention: str, config: MakeConfig, tmp_path: Path
) -> None:
    path = random_model(kind, width=4)
    files = [random_adapter(path, tmp_path / str(rank), rank, rank=rank) for rank in (4, 64, 256)]
    source = config("cpu", slots=1, context_length=512, flash_attention=flash_attention)
    source = replace(source, model_path=str(path))
    plain, plan = planned(source), planned(source, adapters=files)
    with loaded(source, plan, files, mmap=False) as held:
        held.context.apply(tuple((number, 1.0) for number in range(len(files))))
        lines = decoded(held.context)
    taken = parse(lines).bytes_of("compute")
    without, bound = (each.parts["compute"] for each in (plain, plan))
    print(f"{kind}, flash attention {flash_attention}: {without:,} → {taken:,}, planned {bound:,}")
    assert without <= taken <= bound < taken + plan.parts["margin"]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_layers_for_multi_token_prediction_are_planned(
    backend: str, config: MakeConfig, gpu: int
) -> None:
    """Their weights, their context, and the memory for their input of hidden states."""
    path = str(random_model("predicting", width=4))
    index = gpu if backend == "cuda" else 0
    source = config(backend, model_path=path, cuda_device=index, mmap=False, slots=2)
    source = source.but(context_length=1024, speculate="mtp")
    plan, without = planned(source), planned(source.but(speculate="off"))
    of_head = head_options(source.settings, plan.context_length, threads=1)
    with loaded(source, plan, mmap=False, mtp=True) as held:
        with closing(Context(held.model, of_head)) as head:
            alone, both = held.prove(), held.prove(head=head)
            held.context.steer(None)  # llama.cpp reserves its buffers again
            lines = decoded(held.context)
    is_gpu, n_embd = held.selected.is_gpu, held.model.n_embd
    weights = [b for b in alone.buffers if b.kind == "weights" and b.is_on_host != is_gpu]
    n_bytes = sum(buffer.size_bytes for buffer in weights)
    assert plan.parts["weights"] == pytest.approx(n_bytes, rel=0.01)
    assert plan.parts["weights"] > without.parts["weights"]
    taken = sum(b.size_bytes for b in both.buffers) - sum(b.size_bytes for b in alone.buffers)
    states = 4 * n_embd * (of_head.n_ubatch + STATES_AHEAD)
    needed = plan.parts["draft"] + plan.host_parts.get("draft", 0)
    assert needed == pytest.approx(taken + states, rel=0.01)
    computes = parse(lines).bytes_of("compute") - plan.host_parts.get("compute", 0)
    print(f"{backend}: {without.parts['compute']:,} → {computes:,} of {plan.parts['compute']:,}")
    of_states = 4 * n_embd * held.context.options.n_ubatch
    assert 0.99 * without.parts["compute"] <= computes <= 1.01 * plan.parts["compute"]
    assert plan.parts["compute"] == without.parts["compute"] + of_states


@pytest.mark.parametrize("shape", SHAPES)
def test_vulkan_has_room_to_unpack_quantised_cells(
    shape: str, config: MakeConfig, gpu: int
) -> None:
    """A layer's keys and values as 16-bit floats, for all cells."""
    source = config("cuda", shape, cuda_device=gpu, **SETTINGS["small cells"])
    [device] = select_device(source.settings).devices
    header = read_header(source.model_path)

    def margin(registry: str, **changes: Any) -> int:
        settings, budget = replace(source.settings, **changes), cpu_budget(1)
        devices = (replace(device, registry=registry),)
        return memory.plan(memory.PlanRequest(header, settings, devices, budget, "model")).parts[
            "margin"
        ]

    width = SHAPES[shape].embedding * SHAPES[shape].kv_heads // SHAPES[shape].heads
    more = margin("Vulkan") - margin("RPC")
    assert more == pytest.approx(4 * 512 * 2 * 2 * width, rel=0.02)
    assert margin("Vulkan", kv_type_v="f16") == margin("Vulkan", kv_type="f16") == margin("RPC")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mapped_file_is_accounted_for(shape: str, config: MakeConfig) -> None:
    source = config("cpu", shape, mmap=True, slots=2, context_length=512)
    plan = planned(source)
    actual = allocated(proven(source, plan))
    # llama.cpp also counts the file's pages of repacked weights, which the system drops.
    assert plan.parts["weights"] <= 1.02 * actual["weights"]
    without = planned(source.but(mmap=False))
    assert without.needed_bytes - without.memory_bytes == plan.needed_bytes - plan.memory_bytes


def test_planning_reads_no_weights(config: MakeConfig, tmp_path: Any) -> None:
    configured = config("cpu", "tied-q4", context_length=512, slots=2)
    budget = cpu_budget(1)
    before = planned(configured, budget)
    source = read_header(configured.model_path)
    first = min(tensor.offset for tensor in source.tensors)
    hollow = tmp_path / "hollow.gguf"
    with source.path.open("rb") as file, hollow.open("wb") as copy:
        copy.write(file.read(first))
        copy.truncate(source.size_bytes)  # the weights are a hole
    after = planned(replace(configured, model_path=str(hollow)), budget)
    assert after.parts == before.parts
    assert hollow.stat().st_blocks * 512 < source.size_bytes / 2


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"kv_type": "q8_0"}, "model cannot run with 2 slots of 256 tokens, --kv-type q8_0 and "),
        (
            {"kv_type_v": "q8_0", "kv_unified": True},
            "a pool of 512 cells, --kv-type-k f16, --kv-type-v q8_0",
        ),
    ],
)
def test_settings_that_the_model_cannot_run_with_are_a_config_error(
    chosen: dict[str, Any], words: str, config: MakeConfig
) -> None:
    source = config("cpu", "wide-heads", slots=2, flash_attention="off", context_length=256)
    with pytest.raises(ConfigError, match=f"{words}.*--flash-attention off: "):
        planned(source.but(**chosen))


def test_a_matrix_may_have_several_planes() -> None:
    """As in latent attention, with one for each head; ggml ends the process if vectors have another
    number."""
    header = read_header(random_model("dense"))
    matrix = TensorEntry("blk.0.attn_k_b.weight", "F32", (32, 32, 4), 0, 4 * 32 * 32 * 4)
    assert placement.place(replace(header, tensors=(matrix,)), ()).device_bytes == (matrix.n_bytes,)
