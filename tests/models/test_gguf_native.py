"""What our checks let through, llama.cpp loads or refuses; it never ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from worker.models.resolve import resolve

ROOT = Path(__file__).parents[2]


def test_no_damage_that_passes_our_checks_kills_the_native_loader(tmp_path: Path) -> None:
    model = asyncio.run(resolve(None, cache_dir=tmp_path)).gguf_path
    told = subprocess.run(
        [sys.executable, "-m", "tests.models.native_loads", model, tmp_path / "m.gguf", "100"],
        cwd=ROOT,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    result = json.loads(told.stdout.splitlines()[-1])
    assert result["died"] == []
    outcomes = result["outcomes"]
    assert outcomes["decoded"] > 20 and outcomes["refused by us"] > 20
    assert outcomes["refused by llama.cpp"] > 0
