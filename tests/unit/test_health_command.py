"""The health check of a container, which finds the address of its first process, the worker."""

from __future__ import annotations

import contextlib
import gc
import socketserver
import ssl
import threading
import time
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificate import own_certificate
from worker import installation
from worker import main as command_line
from worker.commands import chat, health, served
from worker.errors import NotReady, WorkerError
from worker.flags import _parser, parse_flags
from worker.settings import Settings


class Healthy(BaseHTTPRequestHandler):
    status = 200
    body = b'{"status":"healthy"}'

    def do_GET(self) -> None:
        is_known = self.path in ("/health", "/v1/models")
        self.send_response(self.status if is_known else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def first_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(health, "_FIRST_PROCESS", tmp_path / "cmdline")
    return tmp_path / "cmdline"


@pytest.mark.parametrize(
    "before",
    ["llorch-cpu", "/opt/llorch/bin/python\0/opt/llorch/bin/llorch-cpu", "/init\0--\0llorch-cpu"],
)
def test_health_follows_the_flags_of_the_first_process(
    before: str, port: int, first_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{before}\0--model\0tiny\0--host\x000.0.0.0\0--port={port}\0"
    first_process.write_text(line)
    assert command_line.main("cpu", ["health"]) == 0
    assert capsys.readouterr().out == "healthy\n"


def test_own_flags_and_variables_count_if_the_first_process_is_no_worker(
    port: int, first_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_process.write_text("/sbin/init\0")
    assert command_line.main("cpu", ["health", "--port", str(port)]) == 0
    first_process.unlink()
    monkeypatch.setenv("LLORCH_PORT", str(port))
    assert command_line.main("cpu", ["health"]) == 0


def test_a_worker_elsewhere_is_asked_without_an_engine_here(
    port: int, first_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_process.write_text("")
    monkeypatch.setattr(installation, "ENGINE", "no-such-engine")
    assert command_line.main("cpu", ["health", "--port", str(port)]) == 0


def test_an_unhealthy_or_absent_worker_is_a_failure(
    port: int,
    first_process: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first_process.write_text("")
    monkeypatch.setattr(Healthy, "status", 503)
    assert command_line.main("cpu", ["health", "--port", str(port)]) == 1
    assert "The worker is not healthy" in capsys.readouterr().err
    assert command_line.main("cpu", ["health", "--port", "1"]) == 1
    assert "The worker at http://127.0.0.1:1 does not answer" in capsys.readouterr().err
    assert command_line.main("cpu", ["health", "--port", "0"]) == 2
    epilog = _parser("cpu", "health").epilog or ""
    assert "0 the worker is healthy, 1 it is not or does not answer, 2 usage" in epilog


@pytest.mark.parametrize("body", [b"[" * 200_000, b'"' + b"x" * (2 << 20), b"[]", b"<html>"])
@pytest.mark.parametrize("command", ["health", "chat"])
def test_an_answer_that_no_worker_gives_is_named_as_such(
    port: int, monkeypatch: pytest.MonkeyPatch, body: bytes, command: str
) -> None:
    monkeypatch.setattr(Healthy, "body", body)
    settings = Settings.load("cpu", {"port": port})
    with pytest.raises(WorkerError, match=r"is not a worker|does not end"):
        if command == "health":
            health.run(settings, as_json=False)
        else:
            with served.client_of(settings) as client:
                chat._model_of(client)


def test_an_answer_without_an_end_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Healthy):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b" ")
                    time.sleep(0.01)

    monkeypatch.setattr(health, "_SECONDS", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with pytest.raises(NotReady, match="its answer does not end"):
            health.run(Settings.load("cpu", {"port": server.server_port}), as_json=False)
        server.shutdown()


@pytest.mark.parametrize(
    ("listens", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7"), ("localhost", "localhost")],
)
def test_a_worker_that_listens_on_all_addresses_is_asked_on_its_own(
    listens: str, expected: str
) -> None:
    with served.client_of(Settings.load("cpu", {"host": [listens]})) as client:
        assert client.base_url.host == expected


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # httpcore's, if nothing answers
def test_a_worker_at_a_unix_socket_is_asked_there(
    first_process: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class AtASocket(socketserver.UnixStreamServer):
        def get_request(self) -> tuple[Any, Any]:
            return super().get_request()[0], ("client", 0)

    with AtASocket(str(tmp_path / "s"), Healthy) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        assert command_line.main("cpu", ["health", "--uds", str(tmp_path / "s")]) == 0
        assert capsys.readouterr().out == "healthy\n"
        server.shutdown()
    with warnings.catch_warnings():
        # httpcore leaves the socket of a failed connection to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        assert command_line.main("cpu", ["health", "--uds", str(tmp_path / "none")]) == 1
        gc.collect()
    assert f"The worker at {tmp_path / 'none'} does not answer" in capsys.readouterr().err


def test_a_certificate_is_trusted_whatever_names_are_in_it(
    first_process: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(own_certificate(tmp_path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with HTTPServer(("127.0.0.2", 0), Healthy) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        flags = ["--host", "127.0.0.2", "--port", str(server.server_port)]
        flags += ["--ssl-certfile", file, "--ssl-keyfile", file]
        assert command_line.main("cpu", ["health", *flags]) == 0
        with served.client_of(Settings.load("cpu", parse_flags("cpu", flags, None))) as client:
            assert client.get("/health").is_success
        server.shutdown()


@pytest.mark.parametrize(
    ("command", "status", "body"),
    [
        ("health", 404, b"<html>\n<p>not found\n"),
        *product(("health", "chat"), (200,), (b"<html>", b"[]", b'{"data":[]}')),
    ],
)
def test_another_server_is_not_taken_for_a_worker(
    port: int,
    first_process: Path,
    command: str,
    status: int,
    body: bytes,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Healthy, "status", status)
    monkeypatch.setattr(Healthy, "body", body)
    assert command_line.main("cpu", [command, "--port", str(port)]) == 1
    assert capsys.readouterr().err.endswith("is not a worker.\n")


def test_an_invalid_host_name_is_reported(
    first_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main("cpu", ["health", "--host", "a..b"]) == 1
    assert "The worker at http://a..b:8080 does not answer" in capsys.readouterr().err


def test_a_chat_needs_its_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--ssl-certfile", "/nowhere", "--ssl-keyfile", "/nowhere")
    assert command_line.main("cpu", ["chat", *files]) == 2
    assert "--ssl-certfile is '/nowhere', which is not a readable file" in capsys.readouterr().err
