"""Cards for tests, if the wheel is for Vulkan and Mesa's software device is available."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import starting
from tests.support.devices.fixtures import SHAPES
from tests.support.devices.other_architectures import encoder
from tests.support.devices.tiny_gguf import write
from tests.support.random_models import Kind, random_model
from tests.support.worker import WorkerProcess
from tools.gpu.cards import Cards, NoCards, drivers
from worker.devices.select import wheel_stamp

Prove = Callable[..., dict[str, Any]]
MakeCards = Callable[[str], Cards]
StartOnCards = Callable[..., WorkerProcess]
SHADER_SECONDS = 900
"""The driver compiles each shader at its first use; later runs find it in the cache."""
PATIENT = ("--stall-timeout", str(SHADER_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def needed() -> None:
    if wheel_stamp().get("backend") != "vulkan":
        pytest.skip("needs the Vulkan wheel: make vulkan-test")
    try:
        drivers()
    except NoCards as error:
        pytest.skip(str(error))


@pytest.fixture
def cards(tmp_path: Path) -> MakeCards:
    return lambda described: Cards(described, tmp_path / "cards")


@pytest.fixture(scope="module")
def start(warm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartOnCards]:
    """Start a worker on the described cards."""
    with starting(tmp_path_factory.mktemp("workers"), warm_cache, ends_well=False) as start_worker:

        def start(
            described: str | Cards, *flags: str, command: Sequence[str] | None = None
        ) -> WorkerProcess:
            cards = described
            if isinstance(cards, str):
                cards = Cards(cards, tmp_path_factory.mktemp("cards") / "cards")
            env = cards.environment()
            worker = start_worker(
                *flags, backend="vulkan", command=command, env=env, wait_ready=False
            )
            worker.wait_ready(SHADER_SECONDS)
            return worker

        yield start


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    files = {name: write(folder / f"{name}.gguf", shape) for name, shape in SHAPES.items()}
    kinds: tuple[Kind, ...] = ("windowed", "recurrent")
    files |= {kind: random_model(kind, head=32) for kind in kinds}
    packed = random_model("convolved", width=2, head=32, packed=True)
    return files | {"encoder": encoder(folder / "encoder.gguf"), "packed": packed}


@pytest.fixture
def start_proving(models: dict[str, Path]) -> Callable[..., subprocess.Popen[str]]:
    """Start a process that loads and proves a model on these cards."""

    def start(
        cards: Cards, model: str, without: str = "", **settings: Any
    ) -> subprocess.Popen[str]:
        chosen = {"slots": 2, "context_length": 512} | settings
        environment = os.environ | cards.environment()
        environment.pop(without, None)
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.system.vulkan.proving",
                models[model],
                json.dumps(chosen),
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def prove(start_proving: Callable[..., subprocess.Popen[str]]) -> Prove:
    """Load and prove a model on these cards, in a process that then ends."""

    def run(cards: Cards, model: str, **settings: Any) -> dict[str, Any]:
        with start_proving(cards, model, **settings) as process:
            output, _ = process.communicate(timeout=120)
        found: dict[str, Any] = json.loads(output)
        return found

    return run
