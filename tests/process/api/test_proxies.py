"""Streams through nginx and HAProxy, whose idle timeouts would cut a silent wait in the queue."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests import ROOT
from tests.conftest import StartWorker
from tests.support.held import holding
from tests.support.ports import free_port
from tests.support.sse import Stream, collect
from tests.support.worker import WorkerProcess, until

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_buffer_size 4m;  # root's nginx drops its rights, and cannot write to the folder
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  {timeouts}
  {server}
}}
"""
SERVER = "server { listen 127.0.0.1:{port}; location / { proxy_pass http://127.0.0.1:{worker}; } }"
# The timeouts of Debian's haproxy.cfg; HAProxy itself has none.
HAPROXY = """
defaults
  mode http
  timeout connect 5000
  timeout client {timeout_ms}
  timeout server {timeout_ms}
frontend in
  bind 127.0.0.1:{port}
  default_backend worker
backend worker
  server one 127.0.0.1:{worker}
"""

PATH = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            not shutil.which(kind, path=PATH), reason=f"{kind} is not installed"
        ),
    )
    for kind in ("nginx", "haproxy")
]


@contextmanager
def proxy(
    kind: str, folder: Path, worker: WorkerProcess, timeout_s: int | None, server: str = SERVER
) -> Iterator[str]:
    """A real proxy in front of the worker, with its default timeouts or a shorter one. `server` is
    nginx's server block, with {port} and {worker} for the ports."""
    folder.mkdir()
    port = free_port()
    config = folder / "proxy.conf"
    program = shutil.which(kind, path=PATH)
    assert program
    if kind == "nginx":
        timeouts = f"proxy_read_timeout {timeout_s}s;" if timeout_s else ""
        server = server.replace("{port}", str(port)).replace("{worker}", str(worker.port))
        text = NGINX.format(folder=folder, timeouts=timeouts, server=server)
        command = [program, "-p", str(folder), "-c", str(config)]
    else:
        timeout_ms = timeout_s * 1000 if timeout_s else 50000
        text = HAPROXY.format(port=port, worker=worker.port, timeout_ms=timeout_ms)
        command = [program, "-db", "-f", str(config)]
    config.write_text(text)
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    base_url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "output").read_text()
        try:
            return httpx.get(f"{base_url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(answers, lambda: (folder / "output").read_text())
        yield base_url
    finally:
        process.terminate()
        process.wait(60)


def stream_after_wait(worker: WorkerProcess, base_urls: list[str], wait_s: float) -> list[Stream]:
    """Return the outcome of jobs that waited `wait_s` seconds in the queue of a worker with one
    slot."""
    bodies: dict[str, bytes] = {}

    def run(base_url: str) -> None:
        body = {"job_id": base_url, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        url = f"{base_url}/execute"
        try:
            with httpx.stream("POST", url, json=body, timeout=wait_s + 60) as answer:
                bodies[base_url] = b""
                for chunk in answer.iter_raw():
                    bodies[base_url] += chunk
        except httpx.RemoteProtocolError:
            bodies[base_url] += b""

    with ExitStack() as held:
        # More than one, so that the slot is not free before the engine is frozen.
        for _ in range(3):
            held.enter_context(worker.streaming("Once", max_tokens=1000, ignore_eos=True))
        threads = [threading.Thread(target=run, args=(base_url,)) for base_url in base_urls]
        waiting = worker.metric("worker_queue_prompt_tokens")
        for thread in threads:
            thread.start()
            # A prompt counts once the engine has accepted it; only then the answer begins.
            until(
                lambda before=waiting: worker.metric("worker_queue_prompt_tokens") > before,
                lambda: worker.stderr,
            )
            waiting = worker.metric("worker_queue_prompt_tokens")
        worker.freeze_engine()
        time.sleep(wait_s)
        worker.thaw_engine()
    # The jobs that held the slot ended with their connections; now the waiting ones run.
    for thread in threads:
        thread.join()
    assert set(bodies) == set(base_urls)
    return [collect([bodies[base_url]]) for base_url in base_urls]


@pytest.fixture(scope="module")
def busy(share_worker: StartWorker) -> WorkerProcess:
    """A worker with one slot and frequent comments: HAProxy notices that its client has left
    only when something is written to it."""
    return share_worker("--slots", "1", "--keepalive", "0.25", can_be_held=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_outlives_a_wait_longer_than_the_proxys_timeout(
    busy: WorkerProcess, tmp_path: Path, kind: str
) -> None:
    """Comments are more frequent in the same ratio as the proxy's timeout is shorter."""
    busy.wait_idle()
    with proxy(kind, tmp_path / kind, busy, timeout_s=2) as base_url:
        (stream,) = stream_after_wait(busy, [base_url], 3.0)
    assert stream.comments >= 6 and stream.text == ", there was a gentle fox named Otto"


@pytest.mark.parametrize("kind", KINDS)
def test_events_pass_a_proxy_one_by_one(busy: WorkerProcess, tmp_path: Path, kind: str) -> None:
    """Nothing is buffered until the end: the first token arrives while the job runs."""
    cancelled = 'worker_requests_total{outcome="cancelled"}'
    before = busy.metric(cancelled)
    with proxy(kind, tmp_path / kind, busy, timeout_s=None) as base_url, holding(busy.hold):
        body = {"job_id": f"via-{kind}", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}
        with httpx.stream("POST", f"{base_url}/execute", json=body, timeout=60) as answer:
            received = b""
            parts = answer.iter_raw()
            while b"event: token" not in received:
                received += next(parts)
            assert busy.get("/health").json()["running"] >= 1
        busy.wait_idle()
    assert busy.metric(cancelled) == before + 1, "the proxy tells that its client has left"


@pytest.mark.skipif(not shutil.which("nginx", path=PATH), reason="nginx is not installed")
def test_the_pages_configuration_serves_browsers_and_long_prompts(
    share_worker: StartWorker, tmp_path: Path
) -> None:
    worker = share_worker("--allow-host", "llm.example.com")
    page = (ROOT / "docs" / "operations.md").read_text()
    block = page[
        page.index("    server {") : page.index("- The worker on a loopback address needs")
    ]
    block = block.replace("listen 80;", "listen 127.0.0.1:{port};").replace("8080", "{worker}")
    assert "{port}" in block and "{worker}" in block
    with proxy("nginx", tmp_path / "nginx", worker, timeout_s=None, server=block) as base_url:
        headers = {"host": "llm.example.com", "origin": "https://llm.example.com"}
        body: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        url = f"{base_url}/v1/chat/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        body["messages"] = [{"role": "user", "content": "x" * 2_000_000}]
        refused = httpx.post(url, json=body, headers=headers, timeout=60)
        assert "maximum context length" in refused.text, refused.status_code


@pytest.mark.long
def test_ninety_seconds_in_the_queue_with_default_time_outs(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    kinds = [kind for kind in ("nginx", "haproxy") if shutil.which(kind, path=PATH)]
    assert kinds, "this test needs nginx or HAProxy"
    # The engine is frozen to cause the wait, which must not count as a stall.
    worker = start_worker("--slots", "1", "--stall-timeout", "600")
    first, last = kinds[0], kinds[-1]
    with (
        proxy(first, tmp_path / "first", worker, timeout_s=None) as one,
        proxy(last, tmp_path / "last", worker, timeout_s=None) as other,
    ):
        for stream in stream_after_wait(worker, [one, other], 90.0):
            assert stream.comments >= 5
            assert stream.text == ", there was a gentle fox named Otto"
