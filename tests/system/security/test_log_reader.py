"""Whoever reads the log cannot hold the worker up by not reading it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_port
from tests.support.worker import environment, installed


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_log_reader_that_stops_reading_stops_nothing(
    kind: str, warm_cache: Path, tmp_path: Path
) -> None:
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        ours, theirs = socket.socketpair()
        reader, writer = ours.detach(), theirs.detach()
    fill(writer)
    port = free_port()
    process = subprocess.Popen(
        [*installed(), "--port", str(port), "--log-format", "json", "--log-level", "debug"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=writer,
        env=environment(warm_cache),
        cwd=tmp_path,
    )
    os.close(writer)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            deadline = time.monotonic() + 60
            while not is_ready(http):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            for number in range(5):  # each logs three lines
                body = {"prompt": f"Number {number}", "max_tokens": 1}
                assert http.post("/v1/inference", json=body).status_code == 200
            assert http.get("/health").status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def fill(writer: int) -> None:
    """Write until nothing more fits, as a log does that nobody reads."""
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
