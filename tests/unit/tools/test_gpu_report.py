"""The report of a GPU is made in calls of limited time, each of which continues with the rest."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import clock
from tools.bench import __main__ as bench
from tools.gpu import __main__ as gpu
from tools.gpu.machine import Bench
from tools.gpu.steps import _kept


def test_the_next_call_continues_with_the_remaining_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0  # time passes only in the long step, however busy the machine is
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Bench, "device", "a device")
    ran: list[str] = []

    def step(name: str, limit_s: float) -> tuple[str, float, object]:
        def run(_bench: Bench) -> str:
            nonlocal now
            ran.append(name)
            if ran.count(name) == 1:
                assert name != "wrong", "wrong text"
                if name == "long":
                    now = 2.0
                    time.sleep(60)
            return "found"

        return name, limit_s, run

    steps = [step("quick", 9), step("wrong", 9), step("long", 9), step("longer", 99)]
    monkeypatch.setattr(gpu, "STEPS", steps)
    call = ["--backend", "cpu", "--out", str(tmp_path / "report")]
    assert gpu.main([*call, "--within", "2"]) == 3
    assert ran == ["quick", "wrong", "long"], "it was cut, and for the next there was no time"
    assert "Left for the next call: long, longer." in capsys.readouterr().out
    assert gpu.main([*call, "--within", "100"]) == 1, "one of them failed"
    assert ran[3:] == ["long", "longer"]
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.count("| ok |") == 3 and "AssertionError: wrong text" in text
    assert gpu.main([*call, "--only", "quick"]) == 1 and ran[-1] == "longer", "nothing twice"
    assert gpu.main([*call, "--only", "wrong"]) == 0 and ran[-1] == "wrong"


def test_every_step_fits_into_a_call_however_patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Bench, "device", "a device")
    assert all(limit_s <= gpu.LONGEST_S for _, limit_s, _ in gpu.STEPS)
    monkeypatch.setattr(gpu, "STEPS", [("long", 300.0, lambda _bench: "found")])
    assert gpu.main(["--backend", "cpu", "--patience", "5", "--out", str(tmp_path)]) == 0
    assert f"at most {gpu.LONGEST_S:.0f} s" in capsys.readouterr().err


def test_a_step_ends_its_child_behind_nohup_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell starts background commands with SIGINT ignored, and children inherit that."""

    def step(bench: Bench) -> str:
        return _kept(bench, "slow", [sys.executable, "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(Bench, "device", "a device")
    monkeypatch.setattr(gpu, "STEPS", [("slow", 3.0, step)])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    try:
        assert gpu.main(["--backend", "cpu", "--out", str(tmp_path)]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert "not done within 3 s" in capsys.readouterr().out
    assert clock.in_time(began, 40)


def test_patience_extends_the_workers_stall_timeout() -> None:
    options = bench.parse(["--only", "worker", "--patience", "3"])
    [subject] = bench.subjects_of(options, peers=None)  # type: ignore[arg-type]
    assert subject.kind.patience == 3 and subject.kind.flags == ("--stall-timeout", "180.0")
