"""The environment of processes; `security/` also tests what is not passed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from worker.child_processes import SPINS_AT_BARRIERS, engine_environment, inherited


@pytest.mark.parametrize(
    ("variables", "spins"),
    [
        ({}, SPINS_AT_BARRIERS),
        ({"GOMP_SPINCOUNT": "50000"}, "50000"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_spin_for_a_short_time_unless_the_operator_decides(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert engine_environment().get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    "name",
    [
        *("LOCPATH", "LOCALE_ARCHIVE", "LANGUAGE", "TEMP", "CUBLASLT_LOG_LEVEL", "__GL_SYNC"),
        *("TERM", "NO_COLOR"),
    ],
)
def test_an_engine_inherits_what_its_libraries_and_its_log_read(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "/here")
    of_others = {"OF_ANOTHER_PROGRAM", "LOCAL_LOGIN", "USER_PIN"}
    for other in of_others:
        monkeypatch.setenv(other, "/here")
    environment = engine_environment().keys()
    assert name in environment and of_others.isdisjoint(environment)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the threads")
def test_a_child_process_has_no_threads_of_blas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without available threads, OpenBLAS sends the process an interrupt, so that a conversion used
    to report that somebody had stopped it."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    count = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
    for environment in (inherited(), engine_environment()):
        child = subprocess.run(
            [sys.executable, "-c", count], env=environment, capture_output=True, check=True
        )
        assert int(child.stdout) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "http://me:hunter2@proxy:3128"),
        ("LLORCH_CALLBACK_URL", "https://pool/?a=b@c"),
        ("MYSQL_PASSWD", "hunter2"),
        ("SSH_PASSPHRASE", "hunter2"),
        ("MYSQL_PWD", "hunter2"),
        ("PWD", "/srv"),
    ],
)
def test_a_password_is_inherited_under_no_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert (name in inherited()) == ("hunter2" not in value)
