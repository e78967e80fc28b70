"""Sets of devices: layers are distributed, each with its cache on its device, as planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.devices.fixtures import MakeConfig
from tests.support.devices.loads import loaded, planned
from tests.support.devices.tiny_gguf import Shape, write
from tests.support.random_models import random_model
from worker.devices.plan.placement import buffer_type_name, shared_out
from worker.devices.plan.plan import Plan
from worker.devices.residency import live_check
from worker.errors import ConfigError, InsufficientVram, ResidencyViolation
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.models.gguf.header import read_header

TOKENS = [3, 14, 15, 92, 65, 35]


def greedy(context: Context) -> list[int]:
    batch, tokens, found = Batch(64), TOKENS, []
    for position in (0, *range(len(TOKENS), len(TOKENS) + 5)):
        batch.clear()
        batch.add(0, position, tokens, logits=True)
        assert context.decode(batch) == "ok"
        row = context.logits(len(tokens) - 1)
        tokens = [int(row.argmax())]
        found += tokens
    return found


def windowed(_path: Path) -> Path:
    return random_model("windowed", head=32)


def packed(_path: Path) -> Path:
    return random_model("convolved", width=2, head=32, packed=True)


@pytest.mark.parametrize("shape", ["wide-heads", "grouped-q8", "tied-q4", windowed, packed])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_each_layer_is_planned_and_proven_on_its_own_device(
    kv_type: str,
    shape: str | Callable[[Path], Path],
    config: MakeConfig,
    gpu: int,
    small_gpu: int,
    tmp_path: Path,
) -> None:
    chosen: dict[str, Any] = {"slots": 2, "context_length": 512, "kv_type": kv_type}
    chosen["flash_attention"] = "on"
    where: dict[str, Any] = {"cuda_device": (gpu, small_gpu)}
    if callable(shape):
        wanted = config("cuda", model_path=str(shape(tmp_path / "model.gguf")), **where, **chosen)
    else:
        wanted = config("cuda", shape, **where, **chosen)
    plan = planned(wanted)
    assert plan.device == ("RPC0", "RPC1") and plan.fits
    assert sum(plan.layers) == (read_header(wanted.model_path).block_count or 0) + 1
    with loaded(wanted, plan, mmap=False) as held:
        proof = held.prove()
        text = greedy(held.context)
        live_check.check(held.selected, proof)
    assert proof.resident and proof.layers_on_device == proof.layers_total
    for share in plan.shares:
        margin = share.parts["margin"]
        assert share.needed_bytes - margin == pytest.approx(proof.bytes_on(share.device), rel=0.01)
    assert proof.device_bytes == sum(proof.bytes_on(name) for name in plan.device)
    alone = wanted.but(cuda_device=(gpu,))
    with loaded(alone, planned(alone), mmap=False) as held:
        assert greedy(held.context) == text, "as on one device"


def test_another_split_than_the_planned_one_is_refused(
    config: MakeConfig, gpu: int, small_gpu: int
) -> None:
    wanted = config("cuda", "grouped-q8", cuda_device=(gpu, small_gpu), slots=1, context_length=256)
    with loaded(wanted, planned(wanted), mmap=False, layers=(1, 4)) as held:
        held.model.options = replace(held.model.options, layers=(3, 2))
        with pytest.raises(ResidencyViolation, match="layer 1 of 5 is on RPC1, not on RPC0"):
            held.prove()


def test_weights_and_caches_on_each_others_device_are_refused(
    config: MakeConfig, gpu: int, small_gpu: int
) -> None:
    wanted = config("cuda", "grouped-q8", cuda_device=(gpu, small_gpu), slots=1, context_length=256)
    with loaded(wanted, planned(wanted), mmap=False, layers=(1, 4)) as held:
        names = [buffer_type_name(device) for device in held.selected.devices]
        other = {**dict(zip(names, reversed(names), strict=True)), "RPC0": "RPC1", "RPC1": "RPC0"}
        longest_first = "|".join(map(re.escape, sorted(other, key=len, reverse=True)))
        for each, kind, words in (
            (held.model, "model buffer", "bytes of weights are on RPC0"),
            (held.context, "layer", "the cache of layer 0 is on RPC1, its weights are not"),
        ):
            log = each.load_log
            each.load_log = tuple(
                re.sub(longest_first, lambda match: other[match[0]], line) if kind in line else line
                for line in log
            )
            with pytest.raises(ResidencyViolation, match=words):
                held.prove()
            each.load_log = log


def test_a_model_that_is_too_large_for_one_device_fits_on_two(
    config: MakeConfig, gpu: int, small_gpu: int
) -> None:
    chosen: dict[str, Any] = {"slots": 8, "context_length": 2048}
    with pytest.raises(InsufficientVram):
        planned(config("cuda", "tied-q4", cuda_device=small_gpu, **chosen))
    plan = planned(config("cuda", "tied-q4", cuda_device=(small_gpu, gpu), **chosen))
    assert plan.fits and plan.layers[0] < plan.layers[1], "the smaller one has fewer layers"
    with pytest.raises(InsufficientVram, match="does not fit on RPC[01]: ") as caught:
        planned(
            config("cuda", "tied-q4", cuda_device=(small_gpu, gpu), slots=64, context_length=2**14)
        )
    refused = msgspec.convert(caught.value.details, Plan)
    assert refused.device == caught.value.details["device"]


def test_more_devices_than_layers_are_refused(tmp_path: Path) -> None:
    header = read_header(write(tmp_path / "m.gguf", Shape(layers=1)))
    with pytest.raises(ConfigError, match="1 layers and an output, which 3 devices cannot share"):
        shared_out(header, (1, 1, 1))
