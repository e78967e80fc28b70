"""Addresses of a worker: several hosts, a prefix, a certificate, a Unix socket."""

from __future__ import annotations

import json
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import StartWorker
from tests.support.certificate import own_certificate
from tests.support.worker import run_to_exit, until
from worker.errors import ConfigError
from worker.setting_files import check_certificate
from worker.sockets import listen_at, listen_on


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


def test_an_invalid_certificate_is_refused_by_its_flag(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    with pytest.raises(ConfigError, match="--ssl-certfile is .*not a readable file"):
        check_certificate((str(wrong), str(wrong)))
    wrong.write_text(json.dumps("no PEM"))
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        check_certificate((str(wrong), str(wrong)))
    file = str(own_certificate(tmp_path))
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        check_certificate((file, str(wrong)))
    check_certificate((file, file))
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", file, "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="--ssl-keyfile is .*is encrypted"):
        check_certificate((file, str(locked)))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["127.0.0.1", "localhost", "127.0.0.1"], ["127.0.0.1"]),
        (["127.0.0.1", "0.0.0.0", "127.0.0.2"], ["0.0.0.0"]),
        (["127.0.0.1", "127.0.0.2"], ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_an_address_that_is_given_twice_is_listened_on_once(
    hosts: list[str], expected: list[str]
) -> None:
    listeners = listen_on(hosts, 0)
    assert [each.getsockname()[0] for each in listeners] == expected
    assert len({each.getsockname()[1] for each in listeners}) == 1
    for each in listeners:
        each.close()


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.2", "127.0.0.1"], ["127.0.0.2", "127.0.0.1"]),
        (["192.0.2.1", "127.0.0.1"], ["127.0.0.1"]),  # nobody has the first
    ],
)
def test_a_name_is_listened_on_at_each_address_that_this_machine_has(
    addresses: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **hints: found)
    listeners = listen_on(["a-name"], 0)
    assert [each.getsockname()[0] for each in listeners] == expected
    for each in listeners:
        each.close()


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
    given = {"LLAMA_ARG_CTX_SIZE": "64", "LLAMA_API_KEY": "sk-secret", "LLAMA_TRACE": "1"}
    worker = start_worker(*flags, env=given, wait_ready=False)
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


def test_a_file_at_the_sockets_path_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, tmp_path / "none" / "w.sock"):
        with pytest.raises(ConfigError, match="^--uds is"):
            listen_at(str(path))
    assert file.read_text() == "precious"
