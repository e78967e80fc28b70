"""Addresses of a worker: several hosts, a prefix, a certificate, a Unix socket."""

from __future__ import annotations

import socket
import ssl
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import StartWorker
from tests.support.certificate import own_certificate
from tests.support.worker import run_to_exit, until


def test_a_worker_listens_on_several_addresses_below_a_prefix(start_worker: StartWorker) -> None:
    flags = ("--host", "127.0.0.1,127.0.0.2", "--api-prefix", "/llm/v2")
    worker = start_worker(*flags, wait_ready=False)
    port = worker.port
    assert worker.wait_log("worker.ready")["uri"] == f"http://127.0.0.1:{port}/llm/v2"
    with httpx.Client(trust_env=False) as client:
        for host in ("127.0.0.1", "127.0.0.2"):
            at = f"http://{host}:{port}"
            assert client.get(f"{at}/llm/v2/health").status_code == 200
            assert client.get(f"{at}/llm/v2/v1/models").json()["data"]
            body = {"prompt": "Once", "max_tokens": 1}
            assert client.post(f"{at}/llm/v2/completion", json=body).json()["content"]
        for path in ("/health", "/v1/models", "/", "/llm/v22/health", "/llm"):
            missing = client.get(f"{at}{path}")
            assert missing.status_code == 404 and "/llm/v2/openapi.json" in missing.text
        described = client.get(f"{at}/llm/v2/openapi.json").json()
        assert described["servers"] == [{"url": "/llm/v2"}]
        page = client.get(f"{at}/llm/v2", follow_redirects=True)
        assert page.status_code == 200 and page.url.path == "/llm/v2/"
        assert client.get(page.url.join("page/app.js")).status_code == 200


def test_a_worker_with_a_certificate_streams_over_https(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    file = str(own_certificate(tmp_path))
    running = start_worker("--ssl-certfile", file, "--ssl-keyfile", file, wait_ready=False)
    port = running.wait_log("worker.listening")["port"]
    trusted = ssl.create_default_context(cafile=file)
    with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=60) as client:
        until(lambda: client.get("/ready").status_code == 200, lambda: "not ready", running)
        job = {"job_id": "a", "prompt": "Once", "max_tokens": 4}
        answer = client.post("/execute", json=job)
        assert answer.status_code == 200 and "event: end" in answer.text
    assert running.wait_log("worker.ready")["uri"] == f"https://127.0.0.1:{port}"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/health")


@pytest.mark.parametrize(
    ("host", "manager", "is_told"),
    [
        ("::0", "127.0.0.1", True),
        ("127.0.0.1", "manager.invalid", True),
        ("127.0.0.1", "localhost", False),
    ],
)
def test_an_address_that_the_manager_cannot_reach_and_unread_variables_are_logged(
    start_worker: StartWorker, host: str, manager: str, is_told: bool
) -> None:
    flags = ("--host", host, "--heartbeat-url", f"http://{manager}:9/heartbeat")
    variables = {"LLAMA_ARG_CTX_SIZE": "64", "LLAMA_API_KEY": "sk-secret", "LLAMA_TRACE": "1"}
    worker = start_worker(*flags, env=variables, wait_ready=False)
    assert worker.stop() == 0
    assert bool(worker.logs("worker.unreachable_uri")) == is_told
    [warning] = worker.logs("worker.variables_unread")
    assert warning["message"].startswith("LLAMA_API_KEY, LLAMA_ARG_CTX_SIZE: llama-server's")
    assert "sk-secret" not in str(warning)


def test_a_worker_serves_on_a_unix_socket(
    start_worker: StartWorker, warm_cache: Path, tmp_path: Path
) -> None:
    path, keys = tmp_path / "w.sock", tmp_path / "keys"
    keys.write_text("alice:sk-secret\nbob:sk-other\n")
    with socket.socket(socket.AF_UNIX) as left:  # left by a killed worker
        left.bind(str(path))
    flags = ["--uds", str(path), "--api-key-file", str(keys)]
    worker = start_worker(*flags, wait_ready=False)
    assert worker.wait_log("worker.listening")["port"] is None
    assert psutil.Process(worker.pid).net_connections("inet") == []
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://worker.example") as client:
        until(lambda: client.get("/ready").status_code == 200, lambda: "not ready", worker)
        job = {"job_id": "a", "prompt": "Once", "max_tokens": 4}
        assert client.post("/execute", json=job).status_code == 401
        client.headers["authorization"] = "Bearer sk-secret"
        assert "event: end" in client.post("/execute", json=job).text
        assert 'worker_key_requests_total{key="alice"} 1.0' in client.get("/metrics").text
        bob = {"authorization": "Bearer sk-other"}
        assert client.post("/cancel", json={"job_id": "a"}, headers=bob).status_code == 202
    assert worker.wait_log("worker.ready")["uri"] == f"unix:{path}"
    assert worker.logs("request.ended")[0]["key"] == "alice"
    assert "--unix-socket" in worker.stdout

    ended = run_to_exit(*flags, cache_dir=warm_cache)
    assert ended.code == 7 and "in use by another process" in ended.sentence
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert worker.stop() == 0
    assert not path.exists()
    assert "sk-secret" not in worker.stderr + worker.stdout


def test_an_ending_worker_leaves_its_successors_socket(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    path = tmp_path / "worker.sock"
    worker = start_worker("--uds", str(path), wait_ready=False)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(path))
        assert worker.stop() == 0
        assert stat.S_ISSOCK(path.stat().st_mode)
