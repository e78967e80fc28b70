"""Warnings about a certificate by its dates."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.certificate import own_certificate
from worker.api.http import tls
from worker.setting_files import certificate_trouble

DAY = 86400


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """Write a certificate and its key, valid for two days; returns the file and its time of
    creation."""
    return str(own_certificate(tmp_path_factory.mktemp("dates"))), time.time()


@given(st.floats(-5 * DAY, 5 * DAY))
@example(0.0)
def test_the_warning_follows_the_clock(certificate: tuple[str, float], seconds: float) -> None:
    file, made = certificate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: made + seconds)
        warning = certificate_trouble(file)
    if seconds < -60:
        expected = "is not valid before"
    elif 60 < seconds < 2 * DAY * 2 / 3 - 60:
        assert warning == ""
        return
    elif 2 * DAY * 2 / 3 + 60 < seconds < 2 * DAY - 60:
        expected = "expires soon: "
    elif seconds > 2 * DAY + 60:
        expected = "has expired: "
    else:
        return
    assert warning.startswith(f"{file} {expected}") and warning.endswith("GMT")


def test_a_running_server_warns_once_a_day(
    certificate: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even of a certificate that was valid for long when it started."""
    file, made = certificate
    config = uvicorn.Config("", ssl_certfile=file, ssl_keyfile=file, log_config=None)
    config.load_app = lambda: None  # type: ignore[method-assign]
    config.load()
    warnings: list[tuple[int, str]] = []
    hours = [0]

    def warn(_event: str, message: str) -> None:
        warnings.append((hours[-1], message))

    monkeypatch.setattr(tls, "_log", SimpleNamespace(warning=warn))
    monkeypatch.setattr(time, "time", lambda: made + 3600 * hours[-1])
    monkeypatch.setattr(time, "monotonic", lambda: 3600.0 * hours[-1])
    served = tls.Certificate(config)
    for hour in range(4 * 24):
        hours.append(hour)
        assert served.context is config.ssl
    assert [hour for hour, _ in warnings] == [48, 72]
    assert all("has expired" in message for _, message in warnings)


def test_a_file_without_a_certificate_gets_no_warning_of_dates(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no certificate")
    assert certificate_trouble(str(tmp_path / "key")) == ""
    assert certificate_trouble(str(tmp_path / "missing")) == ""
