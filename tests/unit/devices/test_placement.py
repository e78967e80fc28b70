"""Placement of weights on fake devices; `test_memory` uses real ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.random_models import random_model
from tests.support.samples import write_gguf
from worker.devices.plan import placement
from worker.devices.plan.placement import (
    Weights,
    load_options,
    may_repack,
    place,
    shared_out,
)
from worker.llama import library
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.tensors import TensorEntry

PADDING = 7
"""Additional bytes of each tensor on a device."""
EMBEDDING, POSITIONS, BLOCK, NORM, OUTPUT = 1000, 100, 10, 1, 500
SIZES = {
    "token_embd.weight": EMBEDDING,
    "position_embd.weight": POSITIONS,
    "blk.0.a.weight": BLOCK,
    "blk.0.b.weight": BLOCK,
    "blk.1.a.weight": BLOCK,
    "output_norm.weight": NORM,
    "output.weight": OUTPUT,
}
CPU = library.Device("CPU", "", "cpu", "CPU", 1)
FIRST, SECOND = (library.Device(f"CUDA{n}", "", "gpu", "CUDA", 10 + n) for n in (0, 1))


def model(architecture: str = "llama", **without: bool) -> GgufHeader:
    """A model of two layers; `output=False` omits that tensor."""
    left_out = {f"{name}.weight" for name, here in without.items() if not here}
    tensors = tuple(
        TensorEntry(name, "F32", (4, 4), 0, size)
        for name, size in SIZES.items()
        if name not in left_out
    )
    header = read_header(random_model("dense"))
    return replace(header, tensors=tensors, block_count=2, architecture=architecture)


class MadeUp:
    """Replaces ggml's answers."""

    takes: Callable[[str], bool]
    repacks: Callable[[str], bool]
    seen: list[int]
    n_open = 0

    def __init__(self) -> None:
        MadeUp.n_open += 1

    def close(self) -> None:
        MadeUp.n_open -= 1

    def allocated_bytes(self, tensor: TensorEntry, buffer_type: int) -> int:
        return tensor.n_bytes + PADDING * (buffer_type != CPU.handle * 100)

    def takes_rows(self, tensor: TensorEntry, device: library.Device, buffer_type: int) -> bool:
        assert buffer_type == device.handle * 100
        return MadeUp.takes(tensor.name)

    def multiplies(
        self, tensor: TensorEntry, device: library.Device, buffer_type: int, n_experts: int
    ) -> bool:
        MadeUp.seen.append(n_experts)
        return buffer_type == 2 and MadeUp.repacks(tensor.name)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = SimpleNamespace(ggml_backend_dev_buffer_type=lambda handle: handle * 100)
    monkeypatch.setattr(placement, "_Meta", MadeUp)
    monkeypatch.setattr(placement, "_extra_buffer_types", lambda device: [1, 2, 3])
    monkeypatch.setattr(library, "ggml", lambda: lib)
    monkeypatch.setattr(library, "devices", lambda: [FIRST, CPU, SECOND])
    MadeUp.takes = MadeUp.repacks = staticmethod(lambda name: True)
    MadeUp.seen, MadeUp.n_open = [], 0


def placed(*names: str) -> tuple[tuple[str, int], ...]:
    return tuple((f"^{re.escape(name)}$", FIRST.handle * 100) for name in names)


BLOCKS = 3 * (BLOCK + PADDING)
LAST = NORM + OUTPUT + 2 * PADDING
INPUT = EMBEDDING + POSITIONS + 2 * PADDING


def test_all_of_a_model_is_on_its_card() -> None:
    found = place(model(), (FIRST,))
    names = placed("token_embd.weight", "position_embd.weight")
    assert found == Weights((INPUT + BLOCKS + LAST,), 0, (), names)
    assert load_options(model(), (FIRST, SECOND)).tensor_placement == names
    assert load_options(model(), ()).tensor_placement == ()
    assert MadeUp.n_open == 0


def test_tensors_that_a_card_cannot_look_up_are_on_the_host() -> None:
    MadeUp.takes = staticmethod(lambda name: name == "position_embd.weight")
    found = place(model(), (FIRST,))
    on_card = POSITIONS + PADDING + BLOCKS + LAST
    names = placed("position_embd.weight")
    assert found == Weights((on_card,), EMBEDDING, ("token_embd.weight",), names)
    # If it is also the output, the card has a copy.
    found = place(model(output=False), (FIRST,))
    copied = on_card - OUTPUT + EMBEDDING
    assert found == Weights((copied,), EMBEDDING, ("token_embd.weight",), names)


def test_layers_are_on_their_cards() -> None:
    """The output counts as a layer; the input is with the first one."""
    first = INPUT + 2 * (BLOCK + PADDING)
    rest = BLOCK + PADDING
    assert place(model(), (FIRST, SECOND), (1, 2)).device_bytes == (first, rest + LAST)
    assert place(model(), (FIRST, SECOND), (2, 1)).device_bytes == (first + rest, LAST)
    MadeUp.takes = staticmethod(lambda name: False)
    found = place(model(output=False), (FIRST, SECOND), (2, 1))
    copied = NORM + EMBEDDING + 2 * PADDING
    assert found.device_bytes == (BLOCKS, copied) and found.host_bytes == EMBEDDING + POSITIONS


@pytest.mark.parametrize(
    ("architecture", "without", "n_copies"),
    [
        ("llama", {"output": False}, 1),
        ("gemma4", {"output": False}, 2),
        ("gemma4", {}, 1),
        ("gemma4", {"output": False, "output_norm": False}, 1),  # an encoder
    ],
)
def test_a_tied_embedding_is_there_twice_if_the_output_is_made_first(
    architecture: str, without: dict[str, bool], n_copies: int
) -> None:
    found = place(model(architecture, **without), (FIRST,))
    own = place(model("llama", **without), (FIRST,))
    extra = (n_copies - 1) * (EMBEDDING + PADDING)
    assert found.device_bytes[0] == own.device_bytes[0] + extra
    assert found.placed == placed("token_embd.weight", "position_embd.weight")


@pytest.mark.parametrize(
    ("architecture", "without", "twice"),
    [
        ("llama", {}, False),
        ("llama", {"output": False}, True),
        ("llama", {"output": False, "output_norm": False}, False),
        ("lfm2moe", {"output": False, "output_norm": False}, True),
    ],
)
def test_on_a_processor_the_output_is_repacked_beside_the_input(
    architecture: str, without: dict[str, bool], twice: bool
) -> None:
    header = model(architecture, **without)
    names = {tensor.name for tensor in header.tensors}
    plain = EMBEDDING + POSITIONS
    repacked = sum(SIZES[name] + PADDING for name in names) - plain - 2 * PADDING
    copy = (EMBEDDING + PADDING) * twice
    assert place(header, ()) == Weights((plain + repacked + copy,), 0, (), ())
    MadeUp.repacks = staticmethod(lambda name: name == "blk.0.a.weight")
    total = sum(SIZES[name] for name in names) + PADDING
    assert place(header, ()).device_bytes == (total,)
    assert set(MadeUp.seen) == {1} and MadeUp.n_open == 0


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST)])
def test_the_largest_tensor_is_one_that_each_device_accepts(
    monkeypatch: pytest.MonkeyPatch, order: placement.Devices
) -> None:
    most = {FIRST: 5 << 20, SECOND: (4 << 20) - 1}
    monkeypatch.setattr(MadeUp, "takes", lambda _, size, device: size <= most[device])
    assert placement.largest_tensor_bytes(order) == 3 << 20
    assert MadeUp.n_open == 0


@pytest.mark.parametrize("used", [3, [1, 3, 2]], ids=["one number", "one of each layer"])
def test_ggml_is_asked_with_the_number_of_used_experts(
    tmp_path: Path, used: int | list[int]
) -> None:
    counts = {"llama.expert_used_count": used}
    place(read_header(write_gguf(tmp_path / "m.gguf", overrides=counts)), ())
    assert set(MadeUp.seen) == {3}


@pytest.mark.parametrize(
    ("sizes", "available", "layers"),
    [
        ((10, 10, 10, 10), (1, 1), (2, 2)),
        ((10, 10, 10, 10), (3, 1), (3, 1)),
        ((10, 10, 10, 10), (1, 3), (1, 3)),
        ((10, 10, 10, 10), (1, 7), (1, 3)),  # by its middle, a layer would be on the first card
        ((10, 10, 10, 10), (100, 1), (3, 1)),
        ((10, 10, 10, 10), (1, 100), (1, 3)),
        ((10, 10, 10, 10), (1, 1, 2), (1, 1, 2)),
        ((10, 10, 10, 10), (1, 1, 100), (1, 1, 2)),
        ((10, 10, 10, 10), (100, 1, 1), (2, 1, 1)),
        ((10, 10, 10, 10, 10, 10), (1, 2, 3), (1, 2, 3)),
        ((30, 10, 10, 10), (1, 1), (1, 3)),
        ((10, 10, 10, 30), (1, 1), (3, 1)),
        ((10, 10, 10, 40), (1, 1), (3, 1)),
        ((10, 10, 12, 10), (11, 10), (2, 2)),
    ],
)
def test_layers_are_distributed_by_their_middles(
    sizes: tuple[int, ...], available: tuple[int, ...], layers: tuple[int, ...]
) -> None:
    *blocks, output = sizes
    tensors = [TensorEntry(f"blk.{n}.w", "F32", (1,), 0, size) for n, size in enumerate(blocks)]
    tensors.append(TensorEntry("output.weight", "F32", (1,), 0, output))
    header = replace(model(), tensors=tuple(tensors), block_count=len(blocks))
    assert shared_out(header, available) == layers


@pytest.mark.parametrize("name", ["blk.0.attn_k_b.weight", "blk.0.ffn_up_exps.weight"])
def test_nothing_is_repacked_beside_a_matrix_that_would_lose_planes(name: str) -> None:
    planes = TensorEntry(name, "Q8_0", (4, 4, 2), 0, BLOCK)
    header = replace(model(), tensors=(*model().tensors, planes))
    one_copy = sum(SIZES.values()) + BLOCK
    loses = "attn" in name  # experts use another multiplication
    assert may_repack(model()) and may_repack(header) is not loses
    assert (place(header, ()).device_bytes == (one_copy,)) is loses
    MadeUp.repacks = staticmethod(lambda each: each != name)
    assert may_repack(header)
