"""The conformance kit: it passes a conforming worker and names each violation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import httpx

from tests import ROOT
from tests.conftest import StartWorker
from tests.support.worker import until


def test_a_real_worker_conforms_and_a_stray_message_does_not(start_worker: StartWorker) -> None:
    kit = subprocess.Popen(
        [sys.executable, "-m", "worker.pool.conformance", "--port", "0", "--token", "t"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert kit.stdout is not None
        url = next(word for word in kit.stdout.readline().split() if word.startswith("http"))
        url = url.rstrip(":")
        running = start_worker(
            *("--callback-url", f"{url}/ready", "--heartbeat-url", f"{url}/heartbeat"),
            *("--heartbeat-interval", "60"),  # so that a busy machine violates no rule
            env={"LLORCH_CALLBACK_TOKEN": "t"},
        )

        def verdict() -> dict[str, Any]:
            body = httpx.get(f"{url}/verdict", trust_env=False, timeout=10).json()
            assert isinstance(body, dict)
            return body

        until(lambda: verdict()["messages"]["callback"] == 1, lambda: str(verdict()))
        assert running.stop() == 0
        assert verdict()["conforms"] is True, verdict()
        stray = httpx.post(f"{url}/heartbeat", json={"status": "?"}, trust_env=False)
        assert stray.status_code == 200
        until(lambda: verdict()["conforms"] is False, lambda: str(verdict()))
        kit.send_signal(signal.SIGINT)
        out, _ = kit.communicate(timeout=20)
    finally:
        kit.kill()
        kit.wait()
        assert kit.stdout is not None
        kit.stdout.close()
    assert kit.returncode == 1
    lines = out.splitlines()
    assert any(line.startswith("callback") and running.base_url in line for line in lines)
    assert any("draining" in line for line in lines)
    assert any(line.startswith("BREACH  heartbeat payload") for line in lines)
    assert lines[-1].startswith("does not conform: 1 callbacks")
    assert json.loads(lines[0].split(maxsplit=1)[1])
