"""What answers say of the installation is not looked up for each of them."""

import pytest

from worker import installation


def test_the_version_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = installation.own_version()
    monkeypatch.setattr(installation, "version", lambda name: pytest.fail(f"{name} is read again"))
    assert installation.own_version() == first != "0+unknown"
