"""Tiny models of several shapes and devices that play the GPU.

llama.cpp's RPC plug-in registers a device of kind GPU whose memory and arithmetic belong to
another process, so a machine without a GPU uses the real offload path. `rpc.py` starts such
processes, and `rpc_device.py` makes the worker's code use them. The plug-in is beside our CPU wheel
(`<venv>/test-plugins`), never in one, and never in an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from tests.support.devices import rpc, rpc_device
from tests.support.devices.tiny_gguf import Shape, write
from worker.devices import select
from worker.wire.engine_settings import EngineSettings

SHAPES = {
    "wide-heads": Shape(layers=2, embedding=128, heads=4, kv_heads=4),
    "grouped-q8": Shape(
        layers=4,
        embedding=256,
        heads=8,
        kv_heads=2,
        feed_forward=512,
        vocabulary=2048,
        context=4096,
        weight_type=Type.Q8_0,
    ),
    "tied-q4": Shape(
        layers=6,
        embedding=512,
        heads=8,
        kv_heads=8,
        feed_forward=1024,
        vocabulary=4096,
        context=2048,
        tied=True,
        weight_type=Type.Q4_0,
    ),
}


@dataclass(frozen=True, slots=True)
class Given:
    """The model that a test wants loaded, and its settings."""

    settings: EngineSettings
    model_path: str

    def but(self, **changes: Any) -> Given:
        return replace(self, settings=replace(self.settings, **changes))


MakeConfig = Callable[..., Given]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / f"{name}.gguf", shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="session")
def devices_of_this_process() -> Iterator[tuple[str, str]]:
    """A device with enough memory, and one with less than the tests' contexts need.

    NOTE: ggml's registry cannot remove a device, and using one that is gone ends the process. So
    they live as long as the session.
    """
    with rpc.serve(free_bytes=8 << 30) as (large, _), rpc.serve(free_bytes=600 << 20) as (small, _):
        yield large, small


@pytest.fixture(autouse=True)
def other_tests_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide devices that other tests registered, because the CPU command refuses a wheel with
    devices."""
    monkeypatch.setattr(select, "CPU_REGISTRIES", {*select.CPU_REGISTRIES, "RPC"})


@pytest.fixture
def gpu(devices_of_this_process: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of the device with enough memory, which stands in for a GPU."""
    rpc_device.play_gpu(monkeypatch.setattr)
    return rpc_device.register(devices_of_this_process[0])


@pytest.fixture
def small_gpu(gpu: int, devices_of_this_process: tuple[str, str]) -> int:
    return rpc_device.register(devices_of_this_process[1])


@pytest.fixture
def config(models: dict[str, Path]) -> MakeConfig:
    """`config("cuda", "tied-q4", cuda_device=gpu, slots=2…)`."""

    def make(
        backend: str, shape: str = "wide-heads", model_path: str | None = None, **fields: Any
    ) -> Given:
        for name, index in fields.items():
            if name.endswith("_device") and isinstance(index, int):
                fields[name] = (index,)
        settings = EngineSettings(**{"backend": backend} | fields)
        return Given(settings, model_path or str(models[shape]))

    return make
