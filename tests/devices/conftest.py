"""Tiny models of several shapes and devices that play the GPU.

llama.cpp's RPC plug-in registers a device of kind GPU whose memory and arithmetic are those of
another process, so a machine without a GPU takes the real offload path. A worker takes it where
`TEST_LLORCH_DEVICE` is set to `PLUG_IN@host:port` (several endpoints are several devices);
`support/rpc.py` starts such processes and gives the value. The plug-in lies beside our CPU wheel
(`<venv>/test-plugins`), never in one, and never in an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from tests.devices.support import rpc
from tests.devices.support.tiny_gguf import Shape, write
from worker.messages import EngineConfig

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

MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / f"{name}.gguf", shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="session")
def gpu() -> Iterator[str]:
    """A device with all the memory it takes; for this process alone.

    NOTE: ggml's registry cannot forget a device, and asking one that is gone ends the process. So
    devices of this process live as long as the session.
    """
    with rpc.serve(free_bytes=8 << 30) as (setting, _):
        yield setting


@pytest.fixture(scope="session")
def small_gpu() -> Iterator[str]:
    """A second device, with less memory than any of the tests' contexts takes."""
    with rpc.serve(free_bytes=600 << 20) as (setting, _):
        yield setting


@pytest.fixture
def config(models: dict[str, Path]) -> MakeConfig:
    """`config("cuda", "tied-q4", rpc_endpoint=gpu, slots=2…)`."""

    def make(backend: str, shape: str = "wide-heads", **fields: object) -> EngineConfig:
        path = str(models[shape])
        return EngineConfig(
            **{"backend": backend, "model_path": path, "model_ref": shape, "worker_id": "w"}
            | fields  # type: ignore[arg-type]
        )

    return make
