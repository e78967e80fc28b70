"""The plan's arithmetic for a model whose layouts can be computed by hand.

`test_memory` and `test_sets` compare plans with llama.cpp's real allocations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from tests.support.random_adapters import random_adapter
from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from tests.support.samples import write_gguf
from worker.devices.cpu.budget import CpuBudget
from worker.devices.plan import memory, placement
from worker.devices.plan.cells import KvCache, context_options, divided, divisions_of, draft_options
from worker.devices.plan.placement import Weights, largest
from worker.devices.plan.plan import Plan, Share, memory_map
from worker.devices.plan.projector import device_bytes, most_tokens
from worker.devices.plan.unloaded import Layout
from worker.errors import ConfigError, InsufficientVram, ModelError
from worker.llama import library
from worker.llama.context import ContextOptions
from worker.llama.memory_kind import MemoryKind
from worker.models.gguf.header import GgufHeader, read_header
from worker.wire.engine_settings import EngineSettings

MIB = 1 << 20
TRAINED = 4096
CELL, ROW, HOST_ROW, OUT = 1000, 70, 30, 11
"""Bytes of a cell, of a micro-batch's row on the device and on the host, and of a batch's row."""
WEIGHTS, LOOKED_UP, WIDTH = 5_000_000, 300_000, 64
MARGIN = 512 * MIB
"""Of CUDA."""
PLAIN = MemoryKind(moves_states=True)


class ByHand:
    """Replaces `Unloaded`."""

    trained_context_length, n_embd = TRAINED, WIDTH
    kind = PLAIN
    opened = 0
    cell = CELL
    laid_out: ClassVar[list[ContextOptions]] = []

    def __init__(
        self,
        header: GgufHeader,
        devices: placement.Devices,
        layers: tuple[int, ...] = (),
        role: str = "model",
        *,
        mtp: bool = False,
    ) -> None:
        self.path, self._layers = str(header.path), layers or (1,)
        self.weights = Weights((WEIGHTS,), LOOKED_UP if devices else 0, (), ())
        self.weight_bytes = tuple(WEIGHTS * n for n in self._layers)
        ByHand.opened += 1

    def close(self) -> None:
        ByHand.opened -= 1

    def lay_out(self, options: ContextOptions) -> Layout:
        self.laid_out.append(options)
        return Layout(
            kv=tuple(self.cell * options.n_ctx * n for n in self._layers),
            compute=tuple(ROW * options.n_ubatch + number for number in range(len(self._layers))),
            host_compute=HOST_ROW * options.n_ubatch,
            output=OUT * options.n_batch,
            largest_kv=self.cell * options.n_ctx // 10,
            memory_kind=self.kind,
        )


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "Unloaded", ByHand)
    monkeypatch.setattr(placement, "largest_tensor_bytes", lambda devices: 1 << 40)
    ByHand.kind, ByHand.opened, ByHand.cell, ByHand.laid_out = PLAIN, 0, CELL, []
    ByHand.trained_context_length = TRAINED
    yield
    assert ByHand.opened == 0, "what a plan opens it closes"


@pytest.fixture
def header() -> GgufHeader:
    return replace(read_header(random_model("dense")), pooling=None)


class Cards:
    """Devices, and what each reports about its memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._told: dict[int, library.DeviceProperties] = {}
        monkeypatch.setattr(library, "properties_of", lambda device: self._told[device.handle])

    def card(
        self, free: int, total: int | None = None, registry: str = "CUDA", kind: Any = "gpu"
    ) -> library.Device:
        number = len(self._told)
        total = free if total is None else total
        self._told[number] = library.DeviceProperties(free, total)
        return library.Device(f"CARD{number}", "a card", kind, registry, number)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    return Cards(monkeypatch)


def planned(
    header: GgufHeader,
    *devices: library.Device,
    host: int = 64 << 30,
    beside: Mapping[str, Any] | None = None,
    **chosen: Any,
) -> Plan:
    chosen = {"snapshot_mib": 0, "backend": "cuda" if devices else "cpu"} | chosen
    budget = CpuBudget(1, "", None, host)
    settings = EngineSettings(**chosen)
    request = memory.PlanRequest(header, settings, devices, budget, "the model", **beside or {})
    return memory.plan(request)


def whole(**chosen: Any) -> dict[str, Any]:
    return {"slots": 4, "context_length": 1024, "micro_batch": 128, "batch": 256} | chosen


# --- the parts ----------------------------------------------------------------------------


def test_on_a_processor_all_parts_are_in_memory(header: GgufHeader) -> None:
    plan = planned(header, **whole())
    assert plan.parts == {
        "weights": WEIGHTS,
        "kv": 4 * 1024 * CELL,
        "compute": 128 * (ROW + HOST_ROW),
        "output": 256 * OUT,
        "margin": 256 * MIB,
        "states": 0,
    }
    assert (plan.host_parts, plan.layers) == ({}, ())
    assert (plan.kv_cells, plan.context_length, plan.kv_unified) == (4096, 1024, False)
    assert (plan.slots, plan.model, plan.device) == (4, "the model", "CPU")
    assert plan.fits and not plan.capped and plan.available_bytes == 64 << 30
    assert plan.kv_reason == "4 slots × 1,024 tokens, each with cells of its own"
    unified = planned(header, **whole(kv_unified=True))
    assert unified.kv_reason == "4,096 cells in one pool, as --kv-unified asks"


def test_a_card_has_its_own_parts_and_the_host_the_rest(header: GgufHeader, cards: Cards) -> None:
    plan = planned(header, cards.card(8 << 30), **whole())
    assert plan.parts == {
        "weights": WEIGHTS, "kv": 4096 * CELL, "compute": 128 * ROW, "output": 0, "margin": MARGIN,
    }  # fmt: skip
    assert plan.host_parts == {
        "weights": LOOKED_UP, "compute": 128 * HOST_ROW, "output": 256 * OUT, "states": 0,
    }  # fmt: skip
    assert plan.device == "CARD0" and plan.available_bytes == 8 << 30


def test_each_of_several_cards_has_its_share(header: GgufHeader, cards: Cards) -> None:
    devices = [cards.card(8 << 30), cards.card(2 << 30)]
    plan = planned(header, *devices, **whole())
    left = [each - MARGIN for each in (8 << 30, 2 << 30)]
    assert plan.layers == placement.shared_out(header, left)
    for number, (share, n_layers) in enumerate(zip(plan.shares, plan.layers, strict=True)):
        assert share.parts["kv"] == 4096 * CELL * n_layers
        assert share.parts["weights"] == WEIGHTS * n_layers
        assert share.parts["compute"] == 128 * ROW + number
        assert share.parts["margin"] == MARGIN
    assert plan.device == ("CARD0", "CARD1")


def test_a_model_that_embeds_has_no_states_and_a_larger_margin(
    header: GgufHeader, cards: Cards
) -> None:
    pooled = replace(header, pooling="mean")
    plan = planned(pooled, cards.card(8 << 30), context_length=512, kv_store="/x", speculate="mtp")
    assert plan.parts["kv"] == 512 * CELL, "one text's cells, which all share"
    assert plan.host_parts["output"] == 512 * OUT, "each row of a text has an output"
    assert all(each.embeddings for each in ByHand.laid_out)
    assert (plan.slots, plan.kv_cells) == (1, 512), "what is told is what there is"
    assert plan.kv_reason == "512 cells, as many as one sequence may have"
    for unified in (None, True, False):
        many = planned(
            pooled, cards.card(8 << 30), slots=8, kv_cells=9 * TRAINED, kv_unified=unified
        )
        assert (many.slots, many.kv_cells, many.parts["kv"]) == (1, TRAINED, TRAINED * CELL)
        assert many.kv_reason.endswith("the rest of 36,864 would lie idle")
    assert plan.parts["margin"] == MARGIN + 512 * ROW // 2
    assert "states" not in plan.host_parts and "kv_store" not in plan.host_parts
    assert planned(pooled, cards.card(8 << 30)).context_length == TRAINED


@pytest.mark.parametrize(
    ("kind", "prefix_cache", "chosen", "expected"),
    [
        (PLAIN, True, None, None),
        (MemoryKind(recurrent=True), True, None, 256 * MIB),
        (MemoryKind(window=16), True, 3, 3 * MIB),
        (MemoryKind(window=16), False, None, None),
    ],
)
def test_memory_that_cannot_be_cut_needs_states(
    kind: MemoryKind,
    prefix_cache: bool,
    chosen: int | None,
    expected: int | None,
    header: GgufHeader,
) -> None:
    """Even if there is no memory for more of them."""
    ByHand.kind = kind
    without = planned(header, **whole(snapshot_mib=0)).needed_bytes
    room = without + (expected or 0)
    chosen_states = whole(snapshot_mib=chosen, prefix_cache=prefix_cache)
    plan = planned(header, host=room, **chosen_states)
    assert plan.parts["states"] == (expected or 0)


def test_a_store_has_room_for_two_sequences(header: GgufHeader) -> None:
    """With their own cells, or a quarter of the store if that is less."""
    for unified, of_one in ((False, 1024 * CELL), (True, 4096 * CELL)):
        plan = planned(header, **whole(kv_store="/x", kv_unified=unified))
        assert plan.parts["kv_store"] == 2 * of_one
        assert plan.memory_bytes == of_one
    assert planned(header, **whole(kv_store="/x", kv_store_mib=1)).parts["kv_store"] == 2 * MIB // 4
    assert "kv_store" not in planned(header, **whole()).parts


def test_a_draft_model_is_on_the_first_device(header: GgufHeader, cards: Cards) -> None:
    beside = {"draft": header}
    devices = [cards.card(8 << 30), cards.card(8 << 30)]
    plan = planned(header, *devices, beside=beside, **whole(context_length=8192))
    assert plan.shares[0].parts["draft"] == WEIGHTS + TRAINED * CELL + 128 * ROW
    assert "draft" not in plan.shares[1].parts
    assert plan.host_parts["draft"] == LOOKED_UP + 128 * (HOST_ROW + OUT)
    plan = planned(header, beside=beside, **whole())
    on_host = 128 * (HOST_ROW + OUT)
    assert plan.parts["draft"] == WEIGHTS + 1024 * CELL + 128 * ROW + on_host
    ByHand.kind = MemoryKind(window=16)
    with pytest.raises(ModelError, match="its memory is recurrent or windowed"):
        planned(header, beside=beside, **whole())
    ByHand.kind = MemoryKind(recurrent=True, most_back=0)  # the model cannot be guessed for
    assert "draft" not in planned(header, beside=beside, **whole()).parts


def test_layers_for_multi_token_prediction_have_a_context_of_their_own(header: GgufHeader) -> None:
    with pytest.raises(ConfigError, match="has no layers for multi-token prediction"):
        planned(header, **whole(speculate="mtp"))
    own = read_header(random_model("predicting"))
    plan = planned(own, **whole(speculate="mtp"))
    states = 4 * WIDTH * (128 + 64)
    assert plan.parts["draft"] == 1024 * CELL + 128 * (ROW + HOST_ROW + OUT) + states


def test_a_projector_is_on_the_device_and_its_embeddings_in_memory(
    header: GgufHeader, cards: Cards
) -> None:
    eyes = read_header(random_projector("gemma3"))
    plan = planned(header, cards.card(8 << 30), beside={"projector": eyes}, **whole())
    assert plan.parts["projector"] == device_bytes(eyes, 1024)
    assert plan.host_parts["embeddings"] == 64 * MIB


def test_adapters_and_control_vectors_count_as_weights(header: GgufHeader, tmp_path: Path) -> None:
    base = random_model("dense")
    files = [random_adapter(base, tmp_path / str(rank), rank, rank=rank) for rank in (4, 32)]
    adapters = tuple(map(read_header, files))
    plan = planned(header, beside={"adapters": adapters}, **whole())
    assert plan.parts["weights"] == WEIGHTS + sum(each.size_bytes for each in adapters)
    widest = max(
        sum(factor.shape)
        for adapter in adapters
        for factor in adapter.tensors
        if factor.name.endswith(".lora_b")
    )
    assert plan.parts["compute"] == 128 * (ROW + HOST_ROW) + 128 * 4 * widest
    # For experts, as many products as are used.
    of_experts = replace(
        adapters[0],
        tensors=tuple(
            replace(each, shape=(4, 32, 8)) if each.name.endswith(".lora_b") else each
            for each in adapters[0].tensors
        ),
    )
    for number, counts in enumerate((3, [1, 3])):
        file = tmp_path / f"{number}.gguf"
        counted = read_header(write_gguf(file, overrides={"llama.expert_used_count": counts}))
        used = replace(
            header, metadata=counted.metadata, types=counted.types, arrays=counted.arrays
        )
        plan = planned(used, beside={"adapters": (of_experts,)}, **whole())
        assert plan.parts["compute"] == 128 * (ROW + HOST_ROW) + 128 * 4 * (4 + 32) * 3
    plan = planned(header, **whole(control_vector=("/v.gguf",)))
    assert header.embedding_length and header.block_count
    added = 4 * header.embedding_length * header.block_count
    assert plan.parts["weights"] == WEIGHTS + added


# --- the number of cells ------------------------------------------------------------------


def test_a_default_cache_of_the_hosts_memory(header: GgufHeader) -> None:
    """One sequence of the trained length up to 16,384; for all slots what fits into 128 MiB."""
    held = 128 * MIB // CELL // 256 * 256
    plan = planned(header, slots=64)
    assert (plan.kv_cells, plan.context_length) == (held, TRAINED)
    assert plan.kv_unified and not plan.capped
    plan = planned(header, slots=2)
    assert (plan.kv_cells, plan.context_length, plan.kv_unified) == (2 * TRAINED, TRAINED, False)


def test_a_default_cache_of_a_card(header: GgufHeader, cards: Cards) -> None:
    """The trained length for every slot, in at most half of the free memory; for one sequence, all
    of it."""
    plan = planned(header, cards.card(8 << 30), slots=8)
    assert plan.kv_cells == 8 * TRAINED and not plan.capped
    rest = WEIGHTS + 512 * ROW + MARGIN
    left = 16_000 * CELL
    plan = planned(header, cards.card(rest + left), slots=8)
    assert plan.capped and plan.kv_unified and plan.kv_cells == 8000 // 256 * 256
    plan = planned(header, cards.card(rest + 5000 * CELL), slots=8)
    assert plan.capped and plan.kv_cells == TRAINED, "more than the half of 5,000"
    plan = planned(header, cards.card(rest + 3000 * CELL), slots=8)
    assert plan.kv_cells == 3000 // 256 * 256 == plan.context_length, "all of it"
    # A card that shares the host's memory leaves it half, like the host itself.
    shared = cards.card(rest + 3000 * CELL, kind="igpu")
    assert planned(header, shared, slots=8).kv_cells == 1500 // 256 * 256
    fixed = planned(header, **whole()).needed_bytes - 4096 * CELL
    plan = planned(header, host=fixed + 3000 * CELL, slots=8, micro_batch=128, batch=256)
    assert plan.capped and plan.kv_cells == 1500 // 256 * 256


@pytest.mark.parametrize(
    ("on_card", "trained", "slots", "cell", "cells"),
    [
        (False, 1 << 15, 64, 100_000, 1 << 14),  # 128 MiB would hold 1,342
        (False, 1 << 13, 64, 100_000, 1 << 13),
        (False, 1 << 15, 64, 1, 1 << 20),
        (False, 1 << 15, 4, 0, 1 << 17),  # a recurrent model's cells take nothing
        (True, 1 << 15, 64, 1, 1 << 20),
        (True, 1 << 21, 2, 1, 1 << 21),  # one sequence may have its whole trained length
        (True, 1 << 15, 4, 1, 1 << 17),
    ],
)
def test_a_default_cache_has_limits(
    on_card: bool,
    trained: int,
    slots: int,
    cell: int,
    cells: int,
    header: GgufHeader,
    cards: Cards,
) -> None:
    ByHand.trained_context_length, ByHand.cell = trained, cell
    devices = [cards.card(8 << 30)] if on_card else []
    assert planned(header, *devices, slots=slots).kv_cells == cells


@pytest.mark.parametrize("chosen", [{}, {"context_length": 512}, {"kv_cells": 1000}], ids=str)
def test_purely_recurrent_memory_takes_no_cells(chosen: dict[str, Any], header: GgufHeader) -> None:
    ByHand.cell = 0
    assert planned(header, slots=4, **chosen).kv_reason.endswith("tokens, which take no cells")


@pytest.mark.parametrize("slots", [3, 5])
@pytest.mark.parametrize("unified", [False, True])
def test_a_huge_cache_is_planned_from_smaller_ones(
    unified: bool, slots: int, header: GgufHeader
) -> None:
    """All parts grow linearly, so llama.cpp need not lay out one that takes minutes."""
    ByHand.cell = 1
    cells = slots * (1 << 20)
    chosen: dict[str, Any] = {"context_length": 1 << 20, "kv_unified": unified}
    plan = planned(header, slots=slots, kv_cells=cells, **chosen)
    assert plan.kv_cells == cells
    assert plan.parts["kv"] == cells
    assert plan.parts["compute"] == 512 * (ROW + HOST_ROW)
    assert max(each.n_ctx for each in ByHand.laid_out) <= 1 << 21
    assert all(each.n_ctx % slots == 0 for each in ByHand.laid_out if not each.kv_unified)


@pytest.mark.parametrize(
    ("chosen", "cells", "length", "unified"),
    [
        ({"kv_cells": 4096, "slots": 4, "context_length": 1024}, 4096, 1024, False),
        ({"kv_cells": 4095, "slots": 4, "context_length": 1024}, 4096, 1024, True),
        ({"kv_cells": 4096, "slots": 8}, 4096, TRAINED, True),
        ({"kv_cells": 1024, "slots": 8}, 1024, 1024, True),
        ({"kv_cells": 1024, "slots": 8, "kv_unified": False}, 2048, 256, False),
        ({"kv_cells": 2100, "slots": 2, "kv_unified": False}, 2048, 1024, False),
        ({"kv_cells": 600, "slots": 2, "context_length": 300, "kv_unified": False}, 600, 300, 0),
        ({"kv_cells": 1024, "slots": 2, "context_length": 1024, "kv_unified": True}, 1024, 1024, 1),
    ],
)  # fmt: skip
def test_cells_are_divided_among_the_slots(
    chosen: dict[str, Any], cells: int, length: int, unified: bool, header: GgufHeader
) -> None:
    plan = planned(header, **chosen)
    assert (plan.kv_cells, plan.context_length, plan.kv_unified) == (cells, length, unified)
    wanted = chosen["kv_cells"]
    assert (f"the rest of {wanted:,} would lie idle" in plan.kv_reason) == (plan.kv_cells < wanted)


@pytest.mark.parametrize("on_card", [False, True])
@pytest.mark.parametrize("unified", [None, False, True])
def test_recurrent_sequences_share_no_cells(
    unified: bool | None,
    on_card: bool,
    header: GgufHeader,
    cards: Cards,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without attention, a sequence takes no cells from others, no request waits for any, and a
    card need not address any."""
    most_bytes = CELL * 2048 // 10
    monkeypatch.setattr(placement, "largest_tensor_bytes", lambda devices: most_bytes)
    devices = [cards.card(8 << 30)] if on_card else []
    chosen: dict[str, Any] = {"kv_cells": 1024, "slots": 8, "kv_unified": unified}
    ByHand.cell, ByHand.kind = 0, MemoryKind(recurrent=True)
    plan = planned(header, *devices, **chosen)
    assert (plan.kv_cells, plan.context_length) == (8 * 1024, 1024)
    assert plan.kv_unified == bool(unified) and not plan.kv_divisions
    assert "8 slots × 1,024 tokens" in plan.kv_reason
    ByHand.cell = CELL  # some layers have attention
    cells = planned(header, *devices, **chosen).kv_cells
    assert cells == (2048 if unified is False else 1024)


def test_a_sequence_has_no_more_cells_than_there_are(header: GgufHeader) -> None:
    assert planned(header, kv_cells=512, context_length=512, slots=1).context_length == 512
    with pytest.raises(ConfigError, match="513, which is more than --kv-cells \\(512\\); it may"):
        planned(header, kv_cells=512, context_length=513)
    parts: dict[str, Any] = {"kv_cells": 1024, "slots": 8, "kv_unified": False}
    assert planned(header, **parts, context_length=128).context_length == 128
    with pytest.raises(ConfigError, match="divided by --slots \\(8\\); it may be 128 at most"):
        planned(header, **parts, context_length=129)


def test_a_sequence_is_no_longer_than_the_learned_positions(header: GgufHeader) -> None:
    """With one more, a request would end the engine; rotary positions have no limit."""
    longer = whole(context_length=TRAINED + 1)
    assert planned(header, **longer).context_length == TRAINED + 1
    embedding = next(each for each in header.tensors if each.name == "token_embd.weight")
    positions = replace(embedding, name="position_embd.weight", shape=(WIDTH, TRAINED))
    learned = replace(header, tensors=(*header.tensors, positions))
    for pooling in (None, "mean"):
        model = replace(learned, pooling=pooling)
        assert planned(model, **whole(context_length=TRAINED)).context_length == TRAINED
        with pytest.raises(ConfigError, match="has learned only 4096 positions") as caught:
            planned(model, **longer)
        assert caught.value.details["field"] == "context_length"


def test_cells_that_a_card_cannot_address_are_refused(
    header: GgufHeader, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "largest_tensor_bytes", lambda devices: 4096 * CELL // 10)
    card = cards.card(32 << 30)
    assert planned(header, card, slots=4, context_length=1024).kv_cells == 4096
    with pytest.raises(
        ConfigError, match="5,120 KV cells are more than CARD0 can address"
    ) as caught:
        planned(header, card, slots=4, context_length=1280)
    assert "may be 4,096 at most" in caught.value.message
    assert caught.value.details["field"] == "context_length"
    with pytest.raises(ConfigError) as caught:
        planned(header, card, slots=4, kv_cells=8192)
    assert caught.value.details["field"] == "kv_cells"
    assert planned(header, card, slots=4).kv_cells == 4096


def test_the_plan_of_a_cache_that_is_too_large_to_lay_out_is_extrapolated(
    header: GgufHeader,
) -> None:
    with pytest.raises(InsufficientVram) as caught:
        planned(header, host=1 << 30, **whole(context_length=1 << 24))
    details = caught.value.details
    assert details["parts"]["kv"] == pytest.approx(4 * CELL * (1 << 24), rel=1e-6)
    assert details["parts"]["compute"] == 128 * (ROW + HOST_ROW)
    assert details["parts"]["output"] == 256 * OUT


def test_the_refusal_says_what_would_fit(header: GgufHeader) -> None:
    rest = planned(header, **whole()).needed_bytes - 4096 * CELL
    with pytest.raises(InsufficientVram) as caught:
        planned(header, host=rest + 2100 * CELL, **whole())
    details = caught.value.details
    assert (details["largest_context_length"], details["largest_slots"]) == (512, 2)
    assert caught.value.message.endswith(
        "What would fit: --context-length 512 with 4 slots or --slots 2 with 1024 tokens each."
    )
    with pytest.raises(InsufficientVram, match="--slots 3 with 1024 tokens each"):
        planned(header, host=rest + 3100 * CELL, **whole())
    with pytest.raises(InsufficientVram, match="use a smaller model") as caught:
        planned(header, host=WEIGHTS)
    assert caught.value.details["context_length"] == 256, "not even the shortest"
    assert planned(header, host=rest + 4096 * CELL, **whole()).fits, "to the byte"
    with pytest.raises(InsufficientVram):
        planned(header, host=rest + 4096 * CELL - 1, **whole())


# --- the host's memory --------------------------------------------------------------------


def test_a_card_needs_some_of_the_hosts_memory(header: GgufHeader, cards: Cards) -> None:
    card = cards.card(8 << 30)
    needed = sum(planned(header, card, **whole()).host_parts.values())
    assert planned(header, card, host=needed, **whole()).fits
    with pytest.raises(InsufficientVram, match="needed beside CARD0") as caught:
        planned(header, card, host=needed - 1, **whole())
    assert caught.value.details["needed_bytes"] == needed
    assert caught.value.details["available_bytes"] == needed - 1


def test_a_card_in_the_hosts_memory_shares_it(header: GgufHeader, cards: Cards) -> None:
    shared = cards.card(8 << 30, kind="igpu")
    plan = planned(header, shared, host=6 << 30, **whole())
    assert plan.available_bytes == 6 << 30
    both = plan.needed_bytes + sum(plan.host_parts.values())
    assert planned(header, shared, host=both, **whole()).fits
    with pytest.raises(InsufficientVram, match="of the host's memory"):
        planned(header, shared, host=both - 1, **whole())
    assert (
        planned(header, cards.card(3, total=0), host=4 << 30, **whole()).available_bytes == 4 << 30
    )
    assert planned(header, cards.card(2 << 30, total=9 << 30), **whole()).available_bytes == 2 << 30


@pytest.mark.parametrize("on_card", [False, True])
def test_states_get_a_quarter_of_what_is_left(
    on_card: bool, header: GgufHeader, cards: Cards
) -> None:
    devices = [cards.card(8 << 30)] if on_card else []

    def states(left: int, chosen: int | None) -> int:
        without = planned(header, *devices, **whole(snapshot_mib=0))
        needed = sum((without.host_parts if on_card else without.parts).values())
        plan = planned(header, *devices, host=needed + left, **whole(snapshot_mib=chosen))
        return (plan.host_parts if on_card else plan.parts)["states"]

    assert states(400 * MIB, None) == 100 * MIB
    assert states(400 << 30, None) == 8 << 30
    assert states(400 * MIB, 50) == 50 * MIB
    assert states(40 * MIB, 50) == 40 * MIB
    assert states(0, None) == 0


def test_memory_that_needs_states_gets_more_of_them(header: GgufHeader) -> None:
    ByHand.kind = MemoryKind(recurrent=True)
    without = planned(header, **whole(snapshot_mib=0)).needed_bytes
    least = 256 * MIB
    plan = planned(header, host=without + least + 400 * MIB, **whole(snapshot_mib=None))
    assert plan.parts["states"] == least + 100 * MIB
    plan = planned(header, host=without + (400 << 30), **whole(snapshot_mib=None))
    assert plan.parts["states"] == 8 << 30
    assert planned(header, **whole(snapshot_mib=300)).parts["states"] == 300 * MIB


def test_a_pool_is_divided_only_while_memory_holds_its_longest_part(header: GgufHeader) -> None:
    chosen: dict[str, Any] = {"slots": 8, "kv_cells": 8192}
    plan = planned(header, **chosen, snapshot_mib=1)  # one of four parts has 2 MB
    assert plan.kv_divisions == () and "divided" not in plan.kv_reason
    plan = planned(header, **chosen, snapshot_mib=2048)
    assert plan.kv_divisions == (8, 4)
    assert plan.kv_reason.endswith("it is divided into 8 parts of 1,024 or 4 parts of 2,048")
    for settings in ({"slots": 8, "kv_cells": 768}, {**chosen, "kv_unified": True}, {"slots": 4}):
        assert planned(header, **settings, snapshot_mib=2048).kv_divisions == (), settings
    ByHand.kind = MemoryKind()  # states do not fit into another layout
    assert planned(header, **chosen, snapshot_mib=2048).kv_divisions == ()


@pytest.mark.parametrize("registry", ["Vulkan", "CUDA"])
def test_vulkan_unpacks_a_layers_quantised_cells(
    registry: str, header: GgufHeader, cards: Cards
) -> None:
    def margin(**kv: Any) -> int:
        card = cards.card(8 << 30, registry=registry)
        return planned(header, card, **whole(**kv)).parts["margin"] - MARGIN

    of_layer = 4096 * CELL // 10
    unpacked = round(2 * 2 * of_layer / (34 / 32)) if registry == "Vulkan" else 0
    assert margin(kv_type="q8_0") == unpacked
    assert margin() == margin(kv_type="q8_0", kv_type_v="f16") == 0
    mixed = round(2 * 2 * of_layer / (34 / 32)) if registry == "Vulkan" else 0
    assert margin(kv_type_k="q4_0", kv_type_v="q8_0") == mixed, "by the larger of both"


# --- smaller things -----------------------------------------------------------------------


def test_a_context_has_the_options_of_its_use() -> None:
    settings = EngineSettings(slots=3, batch=300, micro_batch=200, kv_type="q8_0")
    options = context_options(settings, KvCache(900, 300), threads=2, embeds=False)
    assert (options.n_ctx, options.n_seq_max, options.threads) == (900, 3, 2)
    assert (options.n_batch, options.n_ubatch, options.kv_unified) == (300, 200, False)
    assert (options.n_back, options.mtp, options.offload) == (0, "off", False)
    assert context_options(settings, KvCache(900, 900, True), threads=2, embeds=False).kv_unified
    assert context_options(settings, KvCache(9, 9), threads=1, embeds=False, slots=5).n_seq_max == 5
    pooled = context_options(settings, KvCache(900, 300), threads=1, embeds=True)
    assert (pooled.n_ctx, pooled.n_seq_max, pooled.n_batch, pooled.n_ubatch) == (320, 32, 320, 320)
    assert pooled.embeddings and pooled.kv_unified
    assert context_options(settings, KvCache(9, 320), threads=1, embeds=True).n_batch == 320
    backs: dict[Any, int] = {"auto": 0, "off": 0, "ngram": 7, "mtp": 7}
    for speculate, n_back in backs.items():
        guessing = replace(settings, speculate=speculate)
        for embeds in (False, True):
            options = context_options(guessing, KvCache(900, 300), threads=2, embeds=embeds)
            assert options.n_back == (0 if embeds else n_back)
            assert options.mtp == ("trunk" if speculate == "mtp" and not embeds else "off")
    for micro_batch, n_back in ((1, 0), (3, 1), (8, 6), (9, 7)):
        guessing = replace(settings, speculate="ngram", micro_batch=micro_batch)
        options = context_options(guessing, KvCache(900, 300), threads=2, embeds=False)
        assert options.n_back == n_back, "llama.cpp would end the process with more"
    draft = draft_options(replace(settings, backend="cuda"), 77, threads=3)
    assert (draft.n_ctx, draft.n_seq_max, draft.n_batch, draft.n_ubatch) == (77, 1, 200, 200)
    assert draft.offload and draft.kv_types == ("q8_0", "q8_0")


def test_the_divisions_of_a_pool() -> None:
    assert divisions_of(8192, 8) == (8, 4)
    assert divisions_of(4095, 8) == (4,), "parts of 511 are too short"
    assert divisions_of(1024, 2) == (2,)
    assert divisions_of(1 << 20, 1) == ()
    assert divided(1000, 3) == KvCache(768, 256)


@pytest.mark.parametrize("limit", range(7))
def test_the_largest_that_fits(limit: int) -> None:
    assert largest(5, lambda n: n <= limit) == min(limit, 5)


def shares(*sizes: tuple[int, int]) -> tuple[Share, ...]:
    return tuple(
        Share(
            device=f"D{number}", available_bytes=available, parts={"weights": needed - 5, "kv": 5}
        )
        for number, (needed, available) in enumerate(sizes)
    )


def a_plan(*sizes: tuple[int, int], **changes: Any) -> Plan:
    return replace(
        Plan(
            model="m", shares=shares(*sizes), host_parts={}, context_length=1024,
            trained_context_length=1024, slots=2, kv_cells=2048, kv_unified=False,
            kv_reason="two parts",
        ),
        **changes,
    )  # fmt: skip


def test_a_plan_fits_if_each_share_does() -> None:
    plan = a_plan((10, 10), (20, 30))
    assert plan.fits and (plan.needed_bytes, plan.available_bytes) == (30, 40)
    assert plan.parts == {"weights": 20, "kv": 10}
    full = a_plan((11, 10), (29, 30), (42, 40))
    assert not full.fits
    assert full.refusal().message.startswith(
        "The model does not fit on D2: 42 bytes are needed (weights 37, kv 5), 40 are available."
    )
    assert "does not fit on D0: " in a_plan((12, 10), (101, 100)).refusal().message
    assert msgspec.convert(plan.as_dict(), Plan) == plan
    assert (plan.as_dict()["fits"], plan.as_dict()["needed_bytes"]) == (True, 30)


def test_a_plan_as_a_table() -> None:
    table = a_plan((50 * MIB, 80 * MIB), host_parts={"output": 3 * MIB}).as_table().splitlines()
    assert table[0] == "m on D0: 2 slots, each up to 1,024 tokens"
    assert table[1] == "  cells: two parts"
    assert "  on D0:" not in table and table[-1] == "It fits."
    assert table[-3:-1] == ["  on the host:", f"    output    {3:>14,.2f} MiB"]
    kept = a_plan((1, 2), host_parts={"states": 9}).as_table()
    assert "states: the most that kept prompts may take" in kept
    assert (
        "  on D1:" in a_plan((1, 2), (1, 2)).as_table() and "host" not in a_plan((1, 2)).as_table()
    )
    assert (
        a_plan((6, 5))
        .as_table()
        .endswith(
            "It does not fit. Not even one slot with the shortest context would fit; use a smaller "
            "model."
        )
    )
    text = a_plan((6, 5), largest_context_length=256, slots=1).as_table()
    assert text.endswith("It does not fit. What would fit: --context-length 256 with 1 slot.")
    assert "m on D0: 1 slot up to" in text
    assert (
        a_plan((6, 5), largest_slots=1)
        .as_table()
        .endswith("What would fit: --slots 1 with 1024 tokens each.")
    )
    capped = a_plan((1, 2), capped=True, trained_context_length=4096).as_table()
    assert "1,024 tokens (of the model's 4,096, as many as fit)" in capped
    assert "(" not in a_plan((1, 2), capped=True).as_table().splitlines()[0]
    longer = a_plan((1, 2), trained_context_length=512).as_table()
    assert "1,024 tokens (the model was trained for 512)" in longer


def test_bars_follow_each_other_on_one_scale() -> None:
    share = Share(device="D", available_bytes=80, parts={"a": 20, "b": 40, "c": 0, "d": 1})
    bars = [row.partition("MiB")[2][2:] for row in memory_map(share)]
    assert bars == ["█" * 10, " " * 10 + "█" * 20, "", " " * 30 + "▏", "█" * 30, "█" * 40]
    last = Share(device="D", available_bytes=1000, parts={"a": 999, "b": 1})
    assert memory_map(last)[1].endswith(" " * 39 + "▏")


@pytest.mark.parametrize(
    ("vision", "n_patches"),
    [
        ({}, (96 // 8) ** 2),
        ({"image_size": 80}, 100),
        ({"image_size": None}, (1024 // 8) ** 2),
        ({"patch_size": None}, (96 // 14) ** 2),
        ({"image_size": "odd"}, (1024 // 8) ** 2),
        ({"image_size": 0}, (1024 // 8) ** 2),
    ],
)
@pytest.mark.parametrize("heads", [1 << 16, 1 << 17])
def test_the_attention_of_a_usual_picture_has_room(
    vision: dict[str, Any], n_patches: int, heads: int
) -> None:
    row = 6 * 256 + 2 * 512
    expected = 4 * (n_patches * row + heads * n_patches**2)
    assert compute_bytes(**vision, **{"attention.head_count": heads}) == expected


@pytest.mark.parametrize(
    ("vision", "context_length", "n_patches"),
    [
        ({}, 1 << 20, 10**6),
        ({}, 10**5, 4 * 10**5),  # two by two become one token
        ({"spatial_merge_size": 3}, 10**5, 9 * 10**5),
        ({"spatial_merge_size": None}, 10**5, 4 * 10**5),
        ({"spatial_merge_size": None, "projector.scale_factor": 1}, 10**5, 10**5),
        ({"spatial_merge_size": None, "projector.scale_factor": None}, 10**5, 4 * 10**5),
    ],
)
def test_a_picture_has_no_more_patches_than_the_context_has_room_for(
    vision: dict[str, Any], context_length: int, n_patches: int
) -> None:
    row = 6 * 256 + 2 * 512
    settings = {"image_max_pixels": 64 * 10**6, **vision}
    assert compute_bytes(context_length, **settings) == 4 * n_patches * row


def test_a_small_or_unknown_projector_counts_16_mib() -> None:
    assert compute_bytes() == compute_bytes(embedding_length=None) == 16 * MIB
    assert most_tokens(read_header(random_projector("gemma3"))) == 0
    assert most_tokens(read_header(random_projector("pixtral"))) == 1024


def test_a_sound_is_planned_with_half_a_minute() -> None:
    ear = read_header(random_projector("qwen2a"))
    changed = {"embedding_length": 1000, "feed_forward_length": 10, "attention.head_count": 7}
    metadata = {f"clip.audio.{name}": value for name, value in changed.items()}
    projector = replace(ear, metadata={**ear.metadata, **metadata})
    found = device_bytes(projector, 4096) - projector.tensor_bytes
    assert found == 4 * (1500 * (6 * 1000 + 2 * 10) + 7 * 1500**2)


def compute_bytes(context_length: int = 4096, **vision: Any) -> int:
    """Return the compute bytes of a projector with 256 numbers per patch; `None` omits a header
    value."""
    eyes = read_header(random_projector("gemma3", width=256))
    changed = {f"clip.vision.{name}": value for name, value in vision.items()}
    metadata = {
        key: value for key, value in {**eyes.metadata, **changed}.items() if value is not None
    }
    return device_bytes(replace(eyes, metadata=metadata), context_length) - eyes.tensor_bytes
