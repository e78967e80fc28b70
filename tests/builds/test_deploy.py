"""The deployment files: valid by the schemas, and true to what the worker does."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from worker.setting_faults import ENV_PREFIX
from worker.settings import FIELDS, Settings

DEPLOY = Path(__file__).resolve().parents[2] / "builds" / "deploy"
MANIFESTS = ["kubernetes.yaml", "kubernetes-cuda.yaml"]
UNIT = DEPLOY / "llorch-worker@.service"


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def container(name: str) -> dict[str, Any]:
    (deployment,) = [each for each in resources(name) if each["kind"] == "Deployment"]
    return dict(deployment["spec"]["template"]["spec"]["containers"][0])


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_the_schemas(name: str) -> None:
    validator = importlib.import_module("kubernetes_validate")
    for resource in resources(name):
        assert validator.validate(resource, "1.30", strict=True) is not None
    broken = resources(name)[0]
    broken["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, "1.30", strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_probes_ask_the_right_questions(name: str) -> None:
    worker = container(name)
    paths = {kind: worker[kind]["httpGet"]["path"] for kind in worker if kind.endswith("Probe")}
    assert paths == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    (pod,) = [r["spec"]["template"]["spec"] for r in resources(name) if r["kind"] == "Deployment"]
    assert pod["enableServiceLinks"] is False
    drain = next(e["value"] for e in worker["env"] if e["name"] == "LLORCH_DRAIN_TIMEOUT")
    pre_stop = worker["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= float(drain) + pre_stop + 5
    limits = worker["resources"]["limits"]
    assert ("nvidia.com/gpu" in limits) == ("cuda" in name)


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_variable_and_flag_is_a_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.cli import parse_flags

    worker = container(name)
    backend: Any = "cuda" if "cuda" in name else "cpu"
    for variable in worker["env"]:
        assert variable["name"].removeprefix(ENV_PREFIX).lower() in FIELDS
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    settings = Settings.load(backend, parse_flags(backend, worker["args"]))
    assert settings.callback_optional is True
    assert settings.drain_timeout == 30


def test_the_unit_gives_the_drain_its_time_and_does_not_retry_what_cannot_heal() -> None:
    text = UNIT.read_text()
    timeout = int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1])  # type: ignore[index]
    assert timeout >= Settings().drain_timeout + 5
    assert "KillMode=mixed" in text
    prevented = re.search(r"^RestartPreventExitStatus=(.*)$", text, re.M)
    assert prevented is not None and prevented[1].split() == ["2", "3", "4", "5", "7"]
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
