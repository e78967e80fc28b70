"""What our checks let through, llama.cpp loads or refuses; it never ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.models.resolve import resolve

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_no_damage_that_passes_our_checks_kills_the_native_loader(
    tmp_path: Path, count: int
) -> None:
    model = asyncio.run(resolve(None, cache_dir=tmp_path)).gguf_path
    told = subprocess.run(
        [sys.executable, "-m", "tests.models.native_loads", model, tmp_path / "m.gguf", str(count)],
        cwd=ROOT,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    result = json.loads(told.stdout.splitlines()[-1])
    print(result)
    assert result["died"] == []
    outcomes = result["outcomes"]
    assert outcomes["decoded"] > 20 and outcomes["refused by us"] > 20
    assert outcomes["refused by llama.cpp"] > 0
