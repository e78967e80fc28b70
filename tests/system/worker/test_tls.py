"""A worker with a certificate speaks HTTPS and nothing else."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import pytest

from tests.conftest import StartWorker
from tests.support.certificate import own_certificate
from tests.support.worker import until
from worker.errors import ConfigError
from worker.setting_files import check_certificate


def test_a_worker_with_a_certificate_streams_over_https(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    file = str(own_certificate(tmp_path))
    running = start_worker("--ssl-certfile", file, "--ssl-keyfile", file, wait_ready=False)
    port = running.wait_log("worker.listening")["port"]
    trusted = ssl.create_default_context(cafile=file)
    with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=60) as client:
        until(lambda: client.get("/ready").status_code == 200, 60, lambda: "not ready", running)
        job = {"job_id": "a", "prompt": "Once", "max_tokens": 4}
        answer = client.post("/execute", json=job)
        assert answer.status_code == 200 and "event: end" in answer.text
    assert running.wait_log("worker.ready")["uri"] == f"https://127.0.0.1:{port}"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_files_that_are_no_certificate_are_refused_by_name(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    with pytest.raises(ConfigError, match="--ssl-certfile is .*no file"):
        check_certificate((str(wrong), str(wrong)))
    wrong.write_text(json.dumps("no PEM"))
    with pytest.raises(ConfigError, match="are no certificate with its key"):
        check_certificate((str(wrong), str(wrong)))
    file = str(own_certificate(tmp_path))
    with pytest.raises(ConfigError, match="are no certificate with its key"):
        check_certificate((file, str(wrong)))
    check_certificate((file, file))
