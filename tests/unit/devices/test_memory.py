"""Plans against what is then really allocated, on the CPU and on the device that plays the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import clock
from tests.support.devices.fixtures import SHAPES, Given, MakeConfig
from tests.support.random_adapters import random_adapter
from tests.support.random_models import KINDS, Kind, random_model
from worker.devices.cpu.budget import CpuBudget, cpu_budget
from worker.devices.plan import memory
from worker.devices.plan.cells import STATES_AHEAD, KvCache, context_options, head_options
from worker.devices.plan.placement import tensor_placement
from worker.devices.plan.plan import Plan
from worker.devices.residency import proof as residency
from worker.devices.residency.load_report import parse
from worker.devices.select import Selected, select_device
from worker.errors import ConfigError, InsufficientVram
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import read_header

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


def planned(
    config: Given, budget: CpuBudget | None = None, adapters: Sequence[Path] = ()
) -> tuple[Plan, Selected]:
    selected = select_device(config.settings)
    header = read_header(config.model_path)
    budget = budget or cpu_budget(1)
    beside = memory.Beside(tuple(map(read_header, adapters)))
    plan = memory.plan(header, config.settings, selected.devices, budget, "model", beside)
    return plan, selected


def allocated(config: Given, plan: Plan, selected: Selected) -> dict[str, int]:
    """Load for real and add up what llama.cpp then reports, by part."""
    header = read_header(config.model_path)
    options = LoadOptions(
        devices=selected.devices,
        mmap=bool(config.settings.mmap),
        tensor_placement=tensor_placement(header, selected.devices),
    )
    model = Model(config.model_path, options)
    kv = KvCache(plan.kv_cells, plan.context_length, plan.kv_unified)
    wanted = context_options(config.settings, kv, threads=1, embeds=False)
    context = Context(model, wanted)
    found = residency.prove(model, context, selected, header, locked=False)
    context.close()
    model.close()
    parts: Counter[str] = Counter()
    for buffer in found.buffers:
        if buffer.is_on_host != selected.is_gpu:
            parts[buffer.kind] += buffer.size_bytes
    return dict(parts)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_the_plan_is_what_is_then_allocated(
    backend: str, shape: str, settings: str, config: MakeConfig, gpu: int
) -> None:
    index = gpu if backend == "cuda" else 0
    given = config(backend, shape, cuda_device=index, mmap=False, **SETTINGS[settings])
    plan, selected = planned(given)
    actual = allocated(given, plan, selected)
    for part in ("weights", "kv", "compute"):
        assert plan.parts[part] == pytest.approx(actual[part], rel=0.05), part
    total = plan.needed_bytes - plan.parts["margin"] - plan.parts.get("states", 0)
    assert total == pytest.approx(sum(actual.values()), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "flash_attention"), [*((kind, "on") for kind in KINDS), ("dense", "off")]
)
def test_what_adapters_take_while_they_are_computed_is_planned(
    kind: Kind, flash_attention: str, config: MakeConfig, tmp_path: Path
) -> None:
    path = random_model(kind, width=4)
    files = [random_adapter(path, tmp_path / str(rank), rank, rank=rank) for rank in (4, 64, 256)]
    given = config("cpu", slots=1, context_length=512, flash_attention=flash_attention)
    given = replace(given, model_path=str(path))
    plain, _ = planned(given)
    plan, _ = planned(given, adapters=files)
    model = Model(str(path), LoadOptions(mmap=False))
    for file in files:
        model.load_adapter(str(file))
    kv = KvCache(plan.kv_cells, plan.context_length, plan.kv_unified)
    context = Context(model, context_options(given.settings, kv, threads=1, embeds=False))
    batch = Batch(context.options.n_batch)
    batch.add(0, 0, [1] * context.options.n_ubatch, logits=True)
    context.apply(tuple((number, 1.0) for number in range(len(files))))
    with library.log.capture() as lines:
        assert context.decode(batch) == "ok"
    context.close()
    model.close()
    taken = parse(lines).bytes_of("compute")
    without, bound = (each.parts["compute"] for each in (plain, plan))
    print(f"{kind}, flash attention {flash_attention}: {without:,} → {taken:,}, planned {bound:,}")
    assert without <= taken <= bound < taken + plan.parts["margin"]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_layers_for_multi_token_prediction_are_planned(
    backend: str, config: MakeConfig, gpu: int
) -> None:
    """Their weights, their context, and the room for the hidden states that they are given."""
    path = str(random_model("predicting", width=4))
    index = gpu if backend == "cuda" else 0
    given = config(backend, model_path=path, cuda_device=index, mmap=False, slots=2)
    given = given.but(context_length=1024, speculate="mtp")
    plan, selected = planned(given)
    without, _ = planned(given.but(speculate="off"))
    header = read_header(path)
    placed = tensor_placement(header, selected.devices)
    options = LoadOptions(devices=selected.devices, mmap=False, tensor_placement=placed, mtp=True)
    model = Model(path, options)
    kv = KvCache(plan.kv_cells, plan.context_length, plan.kv_unified)
    context = Context(model, context_options(given.settings, kv, threads=1, embeds=False))
    head = Context(model, head_options(given.settings, plan.context_length, threads=1))
    alone, both = (
        residency.prove(model, context, selected, header, locked=False, head=each)
        for each in (None, head)
    )
    batch = Batch(context.options.n_batch)
    batch.add(0, 0, [1] * context.options.n_ubatch, logits=True)
    context.steer(None)  # what llama.cpp has room for is laid out anew
    with library.log.capture() as lines:
        assert context.decode(batch) == "ok"
    for each in (head, context, model):
        each.close()
    weights = [b for b in alone.buffers if b.kind == "weights" and b.is_on_host != selected.is_gpu]
    told = sum(buffer.size_bytes for buffer in weights)
    assert plan.parts["weights"] == pytest.approx(told, rel=0.01)
    assert plan.parts["weights"] > without.parts["weights"]
    taken = sum(b.size_bytes for b in both.buffers) - sum(b.size_bytes for b in alone.buffers)
    states = 4 * model.n_embd * (head.options.n_ubatch + STATES_AHEAD)
    needed = plan.parts["draft"] + plan.host_parts.get("draft", 0)
    assert needed == pytest.approx(taken + states, rel=0.01)
    computes = parse(lines).bytes_of("compute") - plan.host_parts.get("compute", 0)
    print(f"{backend}: {without.parts['compute']:,} → {computes:,} of {plan.parts['compute']:,}")
    of_states = 4 * model.n_embd * context.options.n_ubatch
    assert 0.99 * without.parts["compute"] <= computes <= 1.01 * plan.parts["compute"]
    assert plan.parts["compute"] == without.parts["compute"] + of_states


@pytest.mark.parametrize("shape", SHAPES)
def test_vulkan_has_room_to_unpack_quantised_cells(
    shape: str, config: MakeConfig, gpu: int
) -> None:
    """A layer's keys and values as 16-bit floats, for all cells."""
    given = config("cuda", shape, cuda_device=gpu, **SETTINGS["small cells"])
    [device] = select_device(given.settings).devices
    header = read_header(given.model_path)

    def margin(registry: str, **changes: Any) -> int:
        settings, budget = replace(given.settings, **changes), cpu_budget(1)
        devices = (replace(device, registry=registry),)
        return memory.plan(header, settings, devices, budget, "model").parts["margin"]

    width = SHAPES[shape].embedding * SHAPES[shape].kv_heads // SHAPES[shape].heads
    more = margin("Vulkan") - margin("RPC")
    assert more == pytest.approx(4 * 512 * 2 * 2 * width, rel=0.02)
    assert margin("Vulkan", kv_type_v="f16") == margin("Vulkan", kv_type="f16") == margin("RPC")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mapped_file_is_accounted_for(shape: str, config: MakeConfig) -> None:
    given = config("cpu", shape, mmap=True, slots=2, context_length=512)
    plan, selected = planned(given)
    actual = allocated(given, plan, selected)
    # llama.cpp tells the file's pages, too, that hold what it repacks; the system drops them.
    assert plan.parts["weights"] <= 1.02 * actual["weights"]
    without, _ = planned(given.but(mmap=False))
    assert without.needed_bytes - without.memory_bytes == plan.needed_bytes - plan.memory_bytes


def test_planning_reads_no_weights(config: MakeConfig, tmp_path: Any) -> None:
    given = config("cpu", "tied-q4", context_length=512, slots=2)
    budget = cpu_budget(1)
    before, _ = planned(given, budget)
    source = read_header(given.model_path)
    first = min(tensor.offset for tensor in source.tensors)
    hollow = tmp_path / "hollow.gguf"
    with source.path.open("rb") as file, hollow.open("wb") as copy:
        copy.write(file.read(first))
        copy.truncate(source.size_bytes)  # the weights are a hole
    after, _ = planned(replace(given, model_path=str(hollow)), budget)
    assert after.parts == before.parts
    assert hollow.stat().st_blocks * 512 < source.size_bytes / 2


def test_too_little_memory_is_refused_with_what_would_fit(
    config: MakeConfig, gpu: int, small_gpu: int
) -> None:
    given = config("cuda", "tied-q4", cuda_device=small_gpu, slots=8, context_length=2048)
    with pytest.raises(InsufficientVram) as caught:
        planned(given)
    details = caught.value.details
    assert caught.value.exit_code == 5
    assert details["needed_bytes"] > details["available_bytes"] == 600 << 20
    assert sum(details["parts"].values()) == details["needed_bytes"]
    length, slots = details["largest_context_length"], details["largest_slots"]
    assert 0 < length < 2048 and 0 < slots < 8
    for fitting in ({"context_length": length}, {"slots": slots}):
        plan, _ = planned(given.but(**fitting))
        assert plan.fits
    for excessive in ({"context_length": length + 256}, {"slots": slots + 1}):
        with pytest.raises(InsufficientVram):
            planned(given.but(**excessive))


def test_nothing_fits_and_the_sentence_says_so(config: MakeConfig) -> None:
    budget = replace(cpu_budget(1), memory_available_bytes=100 << 20)
    with pytest.raises(InsufficientVram, match="use a smaller model") as caught:
        planned(config("cpu"), budget)
    assert caught.value.details["largest_context_length"] == 0


def test_a_limit_of_the_control_group_counts_on_the_cpu(config: MakeConfig) -> None:
    given = config("cpu", "tied-q4", slots=8, context_length=2048)
    budget = replace(cpu_budget(1), memory_available_bytes=400 << 20)
    with pytest.raises(InsufficientVram) as caught:
        planned(given, budget)
    assert caught.value.details["available_bytes"] == 400 << 20


def test_a_gpu_worker_needs_some_of_the_hosts_memory_too(config: MakeConfig, gpu: int) -> None:
    budget = replace(cpu_budget(1), memory_available_bytes=1000)
    with pytest.raises(InsufficientVram, match="of the host's memory are needed beside RPC0"):
        planned(config("cuda", cuda_device=gpu, context_length=256), budget)


def test_far_too_large_a_context_is_refused_at_once(config: MakeConfig) -> None:
    given = config("cpu", "tied-q4", slots=256, context_length=2**24, batch=256)
    with clock.at_most(seconds=10), pytest.raises(InsufficientVram) as caught:
        planned(given)
    cells = 256 * 2**24
    assert caught.value.details["parts"]["kv"] == cells * 6 * 2 * 512 * 2


def test_a_chosen_context_length_is_never_shortened(config: MakeConfig) -> None:
    plan, _ = planned(config("cpu", "tied-q4", slots=1, context_length=4096))
    assert plan.context_length == 4096 and not plan.capped


def test_the_automatic_context_length_is_the_models_own(config: MakeConfig) -> None:
    plan, _ = planned(config("cpu", "grouped-q8", slots=2))
    assert plan.context_length == plan.trained_context_length == 4096
    assert not plan.capped


def test_the_cache_that_nobody_chose_is_as_large_as_a_gpu_has_room_for(
    config: MakeConfig, gpu: int, small_gpu: int
) -> None:
    """The trained length for every slot in half of what is left, for one in all of it."""
    ample, _ = planned(config("cuda", "tied-q4", cuda_device=gpu, slots=8))
    assert not ample.capped and ample.kv_cells == 8 * ample.trained_context_length
    given = config("cuda", "tied-q4", cuda_device=small_gpu, slots=8)
    plan, _ = planned(given)
    assert plan.capped and plan.fits
    assert plan.kv_unified and 0 < plan.kv_cells < 8 * plan.trained_context_length == 8 * 2048
    assert plan.context_length == min(plan.kv_cells, plan.trained_context_length)
    assert f"cells: {plan.kv_cells:,} cells in one pool" in plan.as_table()
    left = plan.available_bytes - plan.needed_bytes + plan.parts["kv"]
    assert plan.kv_cells >= plan.trained_context_length
    assert 0.4 * left < plan.parts["kv"] <= 0.55 * left
    alone, _ = planned(given.but(slots=1, kv_type="f32"))
    assert alone.kv_cells == alone.trained_context_length


@pytest.mark.parametrize(
    ("chosen", "cells", "length", "unified"),
    [
        ({}, 10752, 2048, True),  # 128 MiB
        ({"slots": 4}, 4 * 2048, 2048, False),
        ({"kv_cells": 4096}, 4096, 2048, True),
        ({"kv_cells": 4096, "slots": 2}, 4096, 2048, False),
        ({"kv_cells": 1024}, 1024, 1024, True),
        ({"kv_cells": 4096, "kv_unified": False}, 4096, 512, False),
        ({"kv_cells": 4096, "context_length": 512}, 4096, 512, False),
        ({"context_length": 512, "kv_unified": True}, 4096, 512, True),
    ],
)
def test_cells_are_split_where_the_parts_are_long_enough_and_shared_where_not(
    config: MakeConfig, chosen: dict[str, Any], cells: int, length: int, unified: bool
) -> None:
    plan, _ = planned(config("cpu", "tied-q4", **({"slots": 8} | chosen)))
    assert (plan.kv_cells, plan.context_length, plan.kv_unified) == (cells, length, unified)


@pytest.mark.parametrize(
    ("model", "chosen", "divisions"),
    [
        ("tied-q4", {}, (8, 4)),  # 10,752 cells
        ("tied-q4", {"kv_cells": 4096}, (8, 4)),
        ("tied-q4", {"kv_cells": 2048, "slots": 5}, (2,)),
        ("tied-q4", {"kv_cells": 768}, ()),
        ("tied-q4", {"slots": 4}, ()),  # a part for each is enough
        ("tied-q4", {"kv_unified": True}, ()),
        ("tied-q4", {"snapshot_mib": 1}, ()),  # states would not fit while they change
    ],
)
def test_a_pool_is_divided_where_parts_are_of_use(
    config: MakeConfig, model: str, chosen: dict[str, Any], divisions: tuple[int, ...]
) -> None:
    plan, _ = planned(config("cpu", model, **({"slots": 8} | chosen)))
    assert plan.kv_divisions == divisions
    for n in divisions:
        assert f"{n} parts of {plan.kv_cells // n // 256 * 256:,}" in plan.kv_reason


def test_a_sequence_cannot_have_more_cells_than_there_are(config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="--context-length is 2048, which is more than"):
        planned(config("cpu", "tied-q4", context_length=2048, kv_cells=1024))


def test_an_automatic_context_leaves_half_of_a_hosts_memory(config: MakeConfig) -> None:
    given = config("cpu", "tied-q4", slots=8)
    full, _ = planned(given)
    needed = full.needed_bytes - full.memory_bytes
    without_kv = needed - full.parts["kv"]
    just_enough = replace(cpu_budget(1), memory_available_bytes=needed + (1 << 20))
    plan, _ = planned(given, just_enough)
    assert plan.capped
    assert plan.parts["kv"] <= (just_enough.memory_available_bytes - without_kv) * 0.55


@pytest.mark.parametrize("unified", [False, True])
def test_states_get_a_quarter_of_the_hosts_memory_that_is_left(
    config: MakeConfig, gpu: int, unified: bool
) -> None:
    chosen: dict[str, Any] = dict(slots=4, context_length=512, kv_unified=unified)
    full, _ = planned(config("cpu", "tied-q4", **chosen))
    assert full.memory_bytes == full.parts["states"] > 0
    needed = full.needed_bytes - full.memory_bytes
    tight = replace(cpu_budget(1), memory_available_bytes=needed + (20 << 20))
    assert planned(config("cpu", "tied-q4", **chosen), tight)[0].memory_bytes == 5 << 20
    ample = replace(cpu_budget(1), memory_available_bytes=needed + (99 << 30))
    assert planned(config("cpu", "tied-q4", **chosen), ample)[0].memory_bytes == 8 << 30
    for mib in (0, 100):
        plan, _ = planned(config("cpu", "tied-q4", snapshot_mib=mib, **chosen))
        assert plan.memory_bytes == mib << 20
    on_gpu, _ = planned(config("cuda", "tied-q4", cuda_device=gpu, **chosen))
    assert on_gpu.memory_bytes == on_gpu.host_parts["states"] > 0


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"kv_type": "q8_0"}, "model cannot run with 2 slots of 256 tokens, --kv-type q8_0 and "),
        (
            {"kv_type_v": "q8_0", "kv_unified": True},
            "a pool of 512 cells, --kv-type-k f16, --kv-type-v q8_0",
        ),
    ],
)
def test_settings_that_the_model_cannot_run_with_are_a_config_error(
    chosen: dict[str, Any], told: str, config: MakeConfig
) -> None:
    given = config("cpu", "wide-heads", slots=2, flash_attention="off", context_length=256)
    with pytest.raises(ConfigError, match=f"{told}.*--flash-attention off: "):
        planned(given.but(**chosen))


def test_a_model_that_pools_has_room_for_the_logits_of_a_whole_text(config: MakeConfig) -> None:
    given = config("cpu", "wide-heads", context_length=512)
    header = replace(read_header(given.model_path), pooling="mean")
    plan = memory.plan(header, given.settings, (), cpu_budget(1), "model")
    shape = SHAPES["wide-heads"]
    assert plan.parts["output"] == 4 * 512 * (shape.vocabulary + shape.embedding)


def test_cells_that_no_slot_can_use_are_named(config: MakeConfig) -> None:
    given = config("cpu", slots=2, context_length=512, kv_cells=100_000_000)
    plan, _ = planned(given)
    assert plan.kv_cells == 1024
    assert "of 100,000,000 the rest would lie idle" in plan.as_table()


def test_as_table_and_as_json_say_the_same(config: MakeConfig, gpu: int) -> None:
    plan, _ = planned(config("cuda", cuda_device=gpu, context_length=256, slots=2))
    shown = plan.as_dict()
    assert shown["needed_bytes"] == sum(shown["parts"].values())
    assert shown["fits"] is True and shown["device"] == "RPC0"
    table = plan.as_table()
    for name in (*shown["parts"], *shown["host_parts"], "needed", "available"):
        assert name in table
    assert "It fits." in table
