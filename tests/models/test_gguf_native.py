"""What our checks let through, llama.cpp loads or refuses; it never ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from worker.errors import ModelError
from worker.models.gguf.header import read_header
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


def test_a_key_with_control_characters_is_refused(tmp_path: Path) -> None:
    """A damaged length takes the key's value in; llama.cpp aborts at such a key."""
    model = asyncio.run(resolve(None, cache_dir=tmp_path)).gguf_path
    raw, key = model.read_bytes(), b"llama.vocab_size"
    assert raw.count(struct.pack("<Q", len(key)) + key) == 1
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(raw.replace(struct.pack("<Q", len(key)) + key, struct.pack("<Q", 24) + key))
    with pytest.raises(ModelError, match="control characters"):
        read_header(damaged)
