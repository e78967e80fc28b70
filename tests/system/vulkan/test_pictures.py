"""Pictures on a GPU: the worker's answers equal llama-server's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from builds.pins import pins
from tests.support.random_projectors import ProjectorKind, random_projector
from tests.system.vulkan.conftest import PATIENT, SHADER_SECONDS, StartOnCards
from tests.system.worker.test_pictures import (
    KINDS,
    QUESTIONS,
    flags_of,
    llama_server,
    model,
    same_as_peers,
)
from tools import survival
from tools.bench.peer_build import build_peers
from tools.gpu.cards import Cards
from worker.llama import library

ROWS = "64"
"""Rows of a step: for more, the driver compiles a shader for ten minutes."""
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def peer_with_vulkan(folder: Path) -> str:
    """llama-server's own code, linked with the Vulkan wheel's libraries: both are built from the
    same sources."""
    built = Path(build_peers(pins(), os.cpu_count() or 1).program("llama-server"))
    for name in ("llama-server", "libllama-server-impl.so", "libllama-common.so.0"):
        shutil.copy(built.parent / name, folder / name)
    for file in library.folder().glob("lib*.so*"):
        (folder / file.name).symlink_to(file)
        if file.suffix == ".so":
            (folder / f"{file.name}.0").symlink_to(file)
    return str(folder / built.name)


def answers_all(base: str) -> None:
    """Get all answers, with time for the shaders, some of which are specific to each server."""
    for body in QUESTIONS:
        url = f"{base}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=SHADER_SECONDS).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
def test_llama_server_answers_the_same(
    kind: ProjectorKind, start: StartOnCards, tmp_path: Path
) -> None:
    worker = start("discrete:900", *flags_of(kind), "--micro-batch", ROWS, *PATIENT)
    health = worker.get("/health").json()
    assert health["resident"] is True and health["device"] == "Vulkan0"
    answers_all(worker.base_url)
    env = Cards("discrete:900", tmp_path / "cards").environment()
    env["LD_LIBRARY_PATH"] = os.pathsep.join([str(tmp_path), env["LD_LIBRARY_PATH"]])
    peer: Any = {"program": peer_with_vulkan(tmp_path), "env": os.environ | env}
    files = model(kind), random_projector(kind), tmp_path
    with llama_server(*files, "-ub", ROWS, "-ngl", "99", "-lv", "4", **peer) as base:
        answers_all(base)
        same = [same_as_peers(worker, base, body, survival.DEVICE_ROUNDING) for body in QUESTIONS]
        assert all(same)
    log = (tmp_path / "peer.log").read_text()
    assert "CLIP using Vulkan0 backend" in log and "Vulkan0 KV buffer" in log
