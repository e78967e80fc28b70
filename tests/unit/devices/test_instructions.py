"""On processors below the libraries' minimum, a message comes before any illegal instruction."""

import platform
from pathlib import Path

import pytest

from worker.devices.cpu import instructions
from worker.errors import BackendMismatch


def test_this_processor_runs_the_worker() -> None:
    assert instructions.missing() == []
    instructions.check()


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(),
    reason="asks an x86-64 processor under Linux",
)
def test_the_processor_itself_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that no such processor sets are missing, and the kernel's flags agree on an optional
    one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.split() for line in lines if line.startswith("flags"))
    monkeypatch.setattr(instructions, "_V2", {"reserved": 16, "AVX": 28})
    assert instructions.missing() == ["reserved", *([] if "avx" in flags else ["AVX"])]


def test_missing_instructions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "missing", lambda: ["SSE4.2", "POPCNT"])
    with pytest.raises(BackendMismatch, match="lacks SSE4.2, POPCNT; the worker needs x86-64-v2"):
        instructions.check()
