"""The systemd unit: valid, and true to what the worker does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from worker.errors import DownloadError
from worker.setting_faults import ENV_PREFIX
from worker.settings import FIELDS, Settings

DEPLOY = Path(__file__).resolve().parents[3] / "builds" / "deploy"
UNIT = DEPLOY / "llorch-worker@.service"


def test_the_unit_gives_the_drain_its_time_and_does_not_retry_what_cannot_heal() -> None:
    text = UNIT.read_text()
    timeout = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1])  # type: ignore[index]
    assert timeout >= Settings().drain_timeout + 5
    assert "KillMode=mixed" in text
    # If a hub is unavailable for an hour, the unit must not stay down.
    assert "StartLimitIntervalSec=0" in text and DownloadError.exit_code == 6
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", text, re.M)
    assert prevented is not None and prevented[1].split() == ["2", "3", "4", "7"]
    for name in re.findall(r"^Environment=(LLORCH_\w+)=", text, re.M):
        assert name.removeprefix(ENV_PREFIX).lower() in FIELDS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "llorch-worker@.service"
    program = tmp_path / "llorch-cpu"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit.write_text(UNIT.read_text().replace("/opt/llorch/bin/llorch-%i", str(program)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "llorch" not in done.stderr, done.stderr
