"""What the engine process is told by its environment; what it is not told, `security/` tests."""

from __future__ import annotations

import pytest

from worker.supervisor.engine_process import SPINS_AT_BARRIERS, engine_environment


@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, SPINS_AT_BARRIERS),
        ({"GOMP_SPINCOUNT": "50000"}, "50000"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_wait_for_a_short_time_unless_the_operator_says_how(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert engine_environment().get("GOMP_SPINCOUNT") == spins
