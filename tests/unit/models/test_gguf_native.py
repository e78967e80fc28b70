"""llama.cpp loads or refuses files that pass our checks; it never ends the process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.support.bundled import bundled_gguf
from worker.models.adapter import resolve_adapters
from worker.models.gguf.header import read_header
from worker.wire.adapters import parse_adapter

ADAPTER = ROOT / "tests/data/adapter"


@pytest.fixture
def model() -> Path:
    return bundled_gguf("q8_0")


@pytest.fixture
def adapter(model: Path, warm_cache: Path) -> Path:
    wanted = [parse_adapter(str(ADAPTER))]
    [found] = asyncio.run(resolve_adapters(wanted, read_header(model), warm_cache))
    return Path(found.path)


def outcomes_of(module: str, *arguments: object) -> dict[str, Any]:
    """Return the output of a module in this folder."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.models.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(result)
    return result


@pytest.mark.parametrize("count", [30, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_no_damage_that_passes_our_checks_kills_the_native_loader(
    model: Path, tmp_path: Path, count: int
) -> None:
    result = outcomes_of("native_loads", model, tmp_path / "m.gguf", count)
    assert result["died"] == []
    outcomes = result["outcomes"]
    assert outcomes["decoded"] > 20 and outcomes["refused by us"] > 20
    assert outcomes["refused by llama.cpp"] > 0


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_no_damaged_adapter_kills_the_native_loader(
    model: Path, adapter: Path, tmp_path: Path, count: int
) -> None:
    result = outcomes_of("native_loads", model, tmp_path / "a.gguf", count, adapter)
    assert result["died"] == []
    assert result["outcomes"]["decoded"] > 10 and result["outcomes"]["refused by us"] > 20


def test_weights_of_any_type_are_computed_or_refused(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    """Except norms in half precision, which only a CPU does not support."""
    result = outcomes_of("native_types", model, adapter, tmp_path / "t.gguf")
    died = {which for which, outcome in result.items() if outcome.startswith("died")}
    assert died <= {"output_norm.weight F16", "output_norm.weight BF16"}
    for name in ("blk.0.attn_q.weight", "blk.0.attn_q.weight.lora_a"):
        assert result[f"{name} F16"] == result[f"{name} F32"] == "decoded"
        assert result[f"{name} I32"] == result[f"{name} F64"] == "refused by us"
