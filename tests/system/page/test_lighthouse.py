"""Lighthouse's scores of the pages, in a browser on the worker's machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from builds import lighthouse
from tests.support.worker import WorkerProcess

pytestmark = pytest.mark.long
LEAST = 0.95
ATTEMPTS = 3
MOST_BUSY_PERCENT = 15
"""Share of the processors used by other processes, up to which performance is scored. The other
scores do not depend on it."""


def is_quiet() -> bool:
    return psutil.cpu_percent(interval=1) <= MOST_BUSY_PERCENT


def judged(url: str, report: Path) -> dict[str, Any] | None:
    """Return Lighthouse's scores without throttling, because the page comes from this machine or
    network.

    `None` if Lighthouse asks to be run again, as after a browser's first start.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    run = subprocess.run(
        [
            *lighthouse.command(), url, "--quiet", "--output=json", f"--output-path={report}",
            "--preset=desktop", "--throttling-method=provided",
            "--only-categories=performance,accessibility,best-practices,seo",
            "--chrome-flags=--headless=new --no-sandbox",
        ],
        env={**os.environ, "CHROME_PATH": chromium}, timeout=300, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if run.returncode and "Please run Lighthouse again" in run.stderr:
        return None
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(report.read_text("utf-8"))
    return found


@pytest.mark.parametrize("path", ["/", "/chat/", "/docs/"])
def test_lighthouse_finds_little_to_say(worker: WorkerProcess, tmp_path: Path, path: str) -> None:
    best: dict[str, float] = {}
    found: dict[str, Any] | None = None
    for _ in range(ATTEMPTS):
        was_quiet = is_quiet()
        found = judged(worker.base_url + path, tmp_path / "report.json")
        if found is None:
            continue
        scores = {name: each["score"] or 0 for name, each in found["categories"].items()}
        if not (was_quiet and is_quiet()):
            print(f"{path} on a busy machine: {scores}")
            del scores["performance"]
        best |= {name: max(best.get(name, 0), score) for name, score in scores.items()}
        if min(best.values()) >= LEAST:
            break
    print(f"{path}: {best}")
    assert found is not None, "Lighthouse asked three times to be run again"
    poor = {
        name: audit.get("displayValue", audit["title"])
        for name, audit in found["audits"].items()
        if audit["score"] is not None and audit["score"] < LEAST
    }
    assert min(best.values()) >= LEAST, (best, poor)
