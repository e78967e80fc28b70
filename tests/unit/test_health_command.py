"""The check of a container: it asks where its first process, the worker, listens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from worker import cli
from worker.commands import health


class Healthy(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(b'{"status":"healthy"}')

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
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
def test_it_follows_the_flags_of_the_first_process(
    before: str, port: int, first_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{before}\0--model\0tiny\0--host\x000.0.0.0\0--port={port}\0"
    first_process.write_text(line)
    assert cli.main("cpu", ["health"]) == 0
    assert capsys.readouterr().out == "healthy\n"


def test_its_own_flags_and_variables_count_where_the_first_process_is_none(
    port: int, first_process: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_process.write_text("/sbin/init\0")
    assert cli.main("cpu", ["health", "--port", str(port)]) == 0
    first_process.unlink()
    monkeypatch.setenv("LLORCH_PORT", str(port))
    assert cli.main("cpu", ["health"]) == 0


def test_one_that_is_not_well_or_not_there_is_a_failure(
    port: int,
    first_process: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first_process.write_text("")
    monkeypatch.setattr(Healthy, "status", 503)
    assert cli.main("cpu", ["health", "--port", str(port)]) == 1
    assert "The worker is not well" in capsys.readouterr().err
    assert cli.main("cpu", ["health", "--port", "1"]) == 1
    assert "The worker at 127.0.0.1, port 1 does not answer" in capsys.readouterr().err
    assert cli.main("cpu", ["health", "--port", "0"]) == 2


@pytest.mark.parametrize(
    ("listens", "asked"),
    [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7"), ("localhost", "localhost")],
)
def test_a_worker_that_listens_on_all_addresses_is_asked_on_its_own(
    listens: str, asked: str
) -> None:
    assert health.reachable(listens) == asked
