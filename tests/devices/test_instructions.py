"""Below the processors that the libraries need, a sentence comes before any illegal instruction."""

import mmap
import platform
from typing import Any

import pytest

from worker.devices.cpu import instructions
from worker.errors import BackendMismatch

on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="asks an x86-64 processor")


def test_this_processor_runs_the_worker() -> None:
    assert instructions.missing() == []
    instructions.check()


@on_x86_64
def test_what_the_processor_says_and_what_the_kernel_says_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no page may be made executable, the kernel's list of flags has to do."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("no executable pages here")

    from_processor = instructions.missing()
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert instructions.missing() == from_processor


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "missing", lambda: ["SSE4.2", "POPCNT"])
    with pytest.raises(BackendMismatch, match="lacks SSE4.2, POPCNT; the worker needs x86-64-v2"):
        instructions.check()
