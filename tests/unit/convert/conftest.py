from __future__ import annotations

import pytest

from tests.unit.convert.check_here import CheckHere
from worker.convert import prepare


@pytest.fixture(autouse=True)
def _check_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let conversions compare token ids without a child."""
    monkeypatch.setattr(prepare, "TokenCheck", CheckHere)
