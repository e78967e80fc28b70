"""A worker that listens on a Unix socket, and no port."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import httpx
import psutil

from tests.conftest import StartWorker
from tests.support.worker import run_to_exit, until


def test_a_worker_serves_on_a_unix_socket(
    start_worker: StartWorker, warm_cache: Path, tmp_path: Path
) -> None:
    path, keys = tmp_path / "w.sock", tmp_path / "keys"
    keys.write_text("alice:sk-secret\n")
    with socket.socket(socket.AF_UNIX) as left:  # by a worker that was killed
        left.bind(str(path))
    flags = ["--uds", str(path), "--api-key-file", str(keys)]
    worker = start_worker(*flags, wait_ready=False)
    assert worker.wait_log("worker.listening")["port"] is None
    assert psutil.Process(worker.pid).net_connections("inet") == []
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://worker.example") as client:
        until(lambda: client.get("/ready").status_code == 200, 60, lambda: "not ready", worker)
        job = {"job_id": "a", "prompt": "Once", "max_tokens": 4}
        assert client.post("/execute", json=job).status_code == 401
        client.headers["authorization"] = "Bearer sk-secret"
        assert "event: end" in client.post("/execute", json=job).text
        assert 'worker_key_requests_total{key="alice"} 1.0' in client.get("/metrics").text
    assert worker.wait_log("worker.ready")["uri"] == f"unix:{path}"
    assert worker.logs("request.ended")[0]["key"] == "alice"
    assert "--unix-socket" in worker.stdout

    ended = run_to_exit(*flags, cache_dir=warm_cache)
    assert ended.code == 7 and "in use by another process" in ended.sentence
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert worker.stop() == 0
    assert not path.exists()
    assert "sk-secret" not in worker.stderr + worker.stdout


def test_what_is_no_socket_is_left_alone(warm_cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, tmp_path / "none" / "w.sock", tmp_path / ("x" * 120)):
        ended = run_to_exit("--uds", str(path), cache_dir=warm_cache)
        assert ended.code == 2 and "--uds is" in ended.sentence, ended.stderr
    assert file.read_text() == "precious"
