"""The images: the given ones (`LLORCH_TEST_IMAGE`, `LLORCH_TEST_VULKAN_IMAGE`), or built here from
their Dockerfiles."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from builds import images
from tests.system.images.container import base, environment, lent, podman

FIGURES: dict[str, float] = {}


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return os.environ.get("LLORCH_TEST_IMAGE") or _built("cpu", [], tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="session")
def vulkan_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With Mesa's drivers, which include the software device."""
    if built_before := os.environ.get("LLORCH_TEST_VULKAN_IMAGE"):
        return built_before
    drivers = ["DRIVERS=mesa-vulkan-drivers"]
    return _built("vulkan", drivers, tmp_path_factory.mktemp("vulkan"))


def _built(backend: str, arguments: list[str], folder: Path) -> str:
    tag = f"localhost/llorch-{backend}:test"
    line = images.command(
        "podman",
        backend,
        tag,
        images.arguments(backend, given=[f"BASE_IMAGE={base()}", *arguments]),
        # No intermediate layers: this storage driver copies the whole image for each.
        ["--network=host", "--layers=false", *lent(folder)],
    )
    started = time.monotonic()
    done = subprocess.run(line, env=environment())
    assert done.returncode == 0, "the image could not be built; podman's words are above"
    FIGURES[f"{backend}_build_s"] = time.monotonic() - started
    return tag


@pytest.fixture(scope="session")
def figures() -> dict[str, float]:
    """Figures that the tests measured, printed at the end of the run."""
    return FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        rounded = {name: round(value, 1) for name, value in FIGURES.items()}
        terminalreporter.write_line(f"figures: {json.dumps(rounded)}")


def image_size_bytes(image: str) -> int:
    return int(podman("image", "inspect", "--format", "{{.Size}}", image))
