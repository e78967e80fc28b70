"""`git clone`, `make run` and the first token, with an empty cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests import ROOT
from tests.support.ports import free_port

PROMPT = {"job_id": "first", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
WAIT_S = 1700


@pytest.mark.long
@pytest.mark.timeout(WAIT_S + 100)
def test_a_fresh_clone_streams(tmp_path: Path) -> None:
    """Compiles the wheel only for this processor; prints how long the first token took."""
    port, clone = free_port(), tmp_path / "clone"
    inherited = {"PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL"}
    environment = {name: text for name, text in os.environ.items() if name not in inherited}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    started = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    with (tmp_path / "make.log").open("w") as log:
        make = subprocess.Popen(
            ["make", "run", f"ARGS=--port {port}"],
            cwd=clone,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        text, seconds = first_text(f"http://127.0.0.1:{port}", make, started)
        build = httpx.get(f"http://127.0.0.1:{port}/info").json()["engine"]["build"]
    finally:
        os.killpg(make.pid, signal.SIGTERM)
        make.wait(60)
    shown = (tmp_path / "make.log").read_text()
    assert text, shown[-3000:]
    assert build["plugins"] == ["libggml-cpu.so"]
    compiled = [line for line in shown.splitlines() if "compiled in" in line]
    print(f"clone to first token: {seconds:.0f} s ({', '.join(compiled)})")


def first_text(base: str, make: subprocess.Popen[bytes], started: float) -> tuple[str, float]:
    """Return the first streamed text, and the seconds since `started`."""
    while time.monotonic() < started + WAIT_S and make.poll() is None:
        try:
            with httpx.stream("POST", f"{base}/execute", json=PROMPT, timeout=60) as response:
                for line in response.iter_lines() if response.status_code == 200 else ():
                    if line.startswith("data: ") and (found := json.loads(line[6:]).get("t")):
                        return str(found), time.monotonic() - started
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    return "", 0.0
