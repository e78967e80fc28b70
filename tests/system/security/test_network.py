"""Web pages, slow clients and floods on the port of a real worker."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.conftest import StartWorker
from tests.support.scripted_api import ScriptedFactory, scripted
from tests.support.worker import WorkerProcess, computed_s

__all__ = ["scripted"]

JSON = {"Content-Type": "application/json"}
EVIL = {"Origin": "https://evil.example"}
HEALTH_SECONDS = 2.0
"""CPU time of the worker's process, as other processes may use the machine."""


def post(worker: WorkerProcess, path: str, **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    content = b'{"content":"a"}'
    return httpx.post(worker.base_url + path, content=content, headers=sent, timeout=60)


def is_healthy(worker: WorkerProcess) -> bool:
    api = [psutil.Process(worker.pid)]
    began = computed_s(api)
    return worker.get("/health").status_code == 200 and computed_s(api) - began < HEALTH_SECONDS


# --- web pages ---------------------------------------------------------------------------


def test_a_page_cannot_stop_the_worker(worker: WorkerProcess) -> None:
    """`fetch(…/shutdown, {mode: "no-cors"})` sends an origin, but no JSON content type."""
    for headers in ({}, {"Content-Type": "text/plain"}, JSON | EVIL):
        answer = httpx.post(f"{worker.base_url}/shutdown", headers=headers)
        assert answer.status_code == 403 and answer.json()["code"] == "FORBIDDEN"
    refused = httpx.post(f"{worker.base_url}/shutdown").json()
    assert refused["message"] == "/shutdown needs Content-Type: application/json"
    assert worker.is_ready()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content_type": "text/plain"}, 200),
        ({"content_type": "application/x-www-form-urlencoded"}, 200),
        ({"content_type": "text/plain", "origin": "http://127.0.0.1:3000"}, 403),
        ({"content_type": "text/plain", "referer": "https://evil.example/"}, 403),
        ({"content_type": "application/x-www-form-urlencoded", "sec_fetch_site": "none"}, 403),
        ({"content_type": "application/json"}, 200),
        ({"content_type": "Application/JSON; charset=utf-8"}, 200),
        ({"content_type": "application/json", "host": "evil.example"}, 403),
        ({"content_type": "application/json", "host": "localhost:1"}, 200),
        ({"content_type": "application/json", "host": "[::1]:8080"}, 200),
        ({"content_type": "application/json", "host": "127.0.0.1.evil.example"}, 403),
        ({"content_type": "application/json", "origin": "https://evil.example"}, 403),
        ({"content_type": "application/json", "origin": "null"}, 403),
        ({"content_type": "application/json", "origin": "http://[evil"}, 403),
        ({"content_type": "application/json", "origin": "http://127.0.0.1:3000"}, 200),
        ({"content_type": "application/json", "origin": "http://localhost:3000",
          "host": "localhost"}, 200),
    ],
)  # fmt: skip
def test_a_request_is_accepted_by_its_host_origin_and_content_type(
    worker: WorkerProcess, headers: dict[str, str], status: int
) -> None:
    assert post(worker, "/tokenize", **headers).status_code == status


def test_allowed_hosts_and_origins_are_accepted(scripted: ScriptedFactory) -> None:
    allowed = {"allow_host": ("gpu.lan",), "allow_origin": ("https://chat.example",)}
    worker = scripted(**allowed, advertise_host="worker-7")
    for host in ("gpu.lan", "GPU.lan:8080", "worker-7"):
        assert httpx.get(f"{worker.base_url}/health", headers={"Host": host}).is_success
    origin = {"Origin": "https://chat.example"}
    answer = httpx.get(f"{worker.base_url}/health", headers=origin)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    before = httpx.options(f"{worker.base_url}/v1/chat/completions", headers=origin | preflight)
    assert before.status_code == 204 and before.headers["access-control-allow-headers"] == "x-a"
    other = httpx.options(f"{worker.base_url}/v1/chat/completions", headers=EVIL | preflight)
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


# --- sockets -----------------------------------------------------------------------------


HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(worker: WorkerProcess, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", worker.port), timeout=60)
    client.sendall(sent)
    return client


def answer_of(client: socket.socket) -> bytes:
    """Read until the other side closes."""
    received = b""
    try:
        while chunk := client.recv(65536):
            received += chunk
    except ConnectionError:
        pass
    return received


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n", b"403"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", b"403"),
        (b"GET /health HTTP/1.0\r\n", b"200"),
        (b"nonsense\r\n", b"400"),
    ],
)
def test_a_request_needs_exactly_one_host(
    worker: WorkerProcess, head: bytes, status: bytes
) -> None:
    with connected(worker, head + b"Connection: close\r\n\r\n") as client:
        assert answer_of(client).split(b" ")[1] == status


@pytest.fixture(scope="module")
def flooded(share_worker: StartWorker) -> WorkerProcess:
    """A worker only for the floods, because its memory is measured from its start."""
    return share_worker()


@pytest.fixture
def flood() -> Iterator[list[socket.socket]]:
    clients: list[socket.socket] = []
    yield clients
    for client in clients:
        client.close()


def test_bodies_that_never_end_are_bounded(
    flooded: WorkerProcess, flood: list[socket.socket]
) -> None:
    process = psutil.Process(flooded.pid)
    before = process.memory_info().rss
    head = HEAD + b"Content-Length: 4000000\r\n\r\n"
    for _ in range(60):
        client = connected(flooded)
        client.settimeout(2)
        flood.append(client)
        try:
            client.sendall(head + b"x" * 3_900_000)
        except (ConnectionError, TimeoutError):
            continue  # refused while it was sending
    assert is_healthy(flooded)
    assert process.memory_info().rss - before < 100 * 2**20
    for client in flood:
        client.close()
    assert post(flooded, "/tokenize", content_type="application/json").status_code == 200


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("begin", [b"2\r\n{}\r\n0\r\nX: ", b"2;x="], ids=["trailer", "chunk"])
def test_an_endless_trailer_or_chunk_extension_is_cut_off(
    worker: WorkerProcess, begin: bytes
) -> None:
    """To join an endless trailer byte by byte would block the event loop for minutes."""
    with connected(worker, CHUNKED + begin) as client:
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b"a" * 65536)
    assert is_healthy(worker)


def test_unfinished_uploads_do_not_block_small_bodies(
    flooded: WorkerProcess, flood: list[socket.socket]
) -> None:
    size = 4 * 2**20
    for _ in range(9):
        flood.append(connected(flooded, HEAD + b"Content-Length: %d\r\n\r\n" % size))
        flood[-1].settimeout(20)
        try:
            flood[-1].sendall(b" " * (size - 1))
        except OSError:
            pass  # the one too many is refused before it has sent everything
    assert post(flooded, "/tokenize", content_type="application/json").status_code == 200
    assert flooded.post("/cancel", {"job_id": "never"}).status_code == 404


@pytest.mark.long
def test_a_slow_head_gets_a_408(worker: WorkerProcess) -> None:
    with connected(worker, b"GET /health HTTP/1.1\r\n") as client:
        began = time.monotonic()
        assert answer_of(client).split(b" ")[1] == b"408"
        assert 15 < time.monotonic() - began < 30
