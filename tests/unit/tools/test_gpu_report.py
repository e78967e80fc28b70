"""The report of a GPU is made in calls of limited time, each of which goes on with what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import __main__ as bench
from tools.gpu import __main__ as gpu
from tools.gpu.machine import Bench


def test_the_next_call_goes_on_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def step(name: str, limit_s: float, fails: bool = False) -> tuple[str, float, object]:
        def run(_bench: Bench) -> str:
            ran.append(name)
            if fails:
                raise AssertionError("wrong text")
            return "found"

        return name, limit_s, run

    monkeypatch.setattr(gpu, "STEPS", [step("quick", 1), step("wrong", 1, True), step("long", 99)])
    call = ["--backend", "cpu", "--out", str(tmp_path / "report")]
    assert gpu.main([*call, "--within", "50"]) == 3
    assert ran == ["quick", "wrong"]
    assert "Left for the next call: long." in capsys.readouterr().out
    assert gpu.main([*call, "--within", "100"]) == 1, "one of them failed"
    assert ran == ["quick", "wrong", "long"]
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.count("| ok |") == 2 and "AssertionError: wrong text" in text
    assert gpu.main([*call, "--only", "quick"]) == 1 and ran[-1] == "long", "nothing twice"


def test_every_step_fits_into_a_call_however_patient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(limit_s <= gpu.LONGEST_S for _, limit_s, _ in gpu.STEPS)
    monkeypatch.setattr(gpu, "STEPS", [("long", 300.0, lambda _bench: "found")])
    assert gpu.main(["--backend", "cpu", "--patience", "5", "--out", str(tmp_path)]) == 0
    assert f"at most {gpu.LONGEST_S:.0f} s" in capsys.readouterr().err


def test_who_waits_longer_lets_the_worker_wait_longer() -> None:
    options = bench.parse(["--only", "worker", "--patience", "3"])
    [subject] = bench.subjects_of(options, peers=None)  # type: ignore[arg-type]
    assert subject.kind.patience == 3 and subject.kind.flags == ("--stall-timeout", "180.0")
