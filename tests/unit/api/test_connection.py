"""A connection's phases: each side has a time limit for what it owes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing.connection
import os
import re
import resource
import signal
import socket
import ssl
import struct
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.certificate import own_certificate
from tests.support.worker import freeze
from worker.api.http import connection
from worker.api.http.connection import WorkerProtocol, protocol_with
from worker.api.http.one_per_turn import OnePerTurn
from worker.api.http.server import server_for
from worker.api.http.tls import Certificate, TlsListener
from worker.settings import OTHER_FILES

N_SLOW_PARTS = 12
left: list[str] = []
"""Paths of requests that were notified that their client has left."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, unless the path says not to, and answer; under /long only once the client has
    left, under /soon after a moment, under /echo with the request, and under /slow in parts."""
    body = b""
    if scope["path"].startswith("/long"):
        while (await receive())["type"] != "http.disconnect":
            pass
        left.append(scope["path"])
    elif scope["path"].startswith("/soon"):
        await asyncio.sleep(1.0 if scope["path"] == "/soon/1" else 0.05)
    elif not scope["path"].startswith("/early"):
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"].startswith("/echo"):
        names = b",".join(name for name, _ in scope["headers"])
        for part in (b"[", body, b"|", names, b"]"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
    for _ in range(N_SLOW_PARTS if scope["path"].startswith("/slow") else 0):
        await send({"type": "http.response.body", "body": b"y", "more_body": True})
        await asyncio.sleep(0.1)
    for _ in range(64 if scope["path"].startswith("/large") else 0):
        await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
    await send({"type": "http.response.body", "body": b"x"})


@asynccontextmanager
async def served(
    keep_alive_s: int = 75, patience_s: float = 30.0, certificate: Path | None = None
) -> AsyncIterator[tuple[int, set[WorkerProtocol]]]:
    """Serve; yields the port and the server's connections."""
    protocol: Any = protocol_with(patience_s, lambda _: None)
    config = uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        date_header=False,
        timeout_keep_alive=keep_alive_s,
        ssl_certfile=certificate,
        ssl_keyfile=certificate,
    )
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    # Not `uvicorn.Server`, which polls ten times a second whether it must stop, and whether its
    # connections have ended.
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    def make() -> Any:
        return protocol(config=config, server_state=state, app_state={})

    server: Any
    if config.ssl is None:
        server = await loop.create_server(make, sock=listener)
    else:
        server = TlsListener(listener, make, Certificate(config))
    try:
        yield listener.getsockname()[1], state.connections  # type: ignore[misc]
    finally:
        server.close()
        listener.close()
        for each in list(state.connections):
            each.shutdown()
        while state.connections or state.tasks:
            await asyncio.sleep(0.001)


def chunked(parts: list[bytes]) -> bytes:
    framed = [b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts if part]
    return b"".join(framed) + b"0\r\n\r\n"


BODY = st.binary(max_size=40)
PATH = st.sampled_from([b"/", b"/early"])
LINES = b"Host: a\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
REQUESTS = st.one_of(
    st.builds(
        lambda method, path: method + b" " + path + b" HTTP/1.1\r\n" + LINES + b"\r\n",
        st.sampled_from([b"GET", b"HEAD", b"OPTIONS"]),
        PATH,
    ),
    st.builds(
        lambda path, body, more: (
            b"POST %s HTTP/1.1\r\n%s%sContent-Length: %d\r\n\r\n" % (path, LINES, more, len(body))
            + body
        ),
        PATH,
        BODY,
        st.sampled_from([b"", b"Expect: 100-continue\r\n", b"Connection: close\r\n", UPGRADE]),
    ),
    st.builds(
        lambda path, parts: (
            b"POST %s HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n" % (path, LINES)
            + chunked(parts)
        ),
        PATH,
        st.lists(BODY, max_size=4),
    ),
    st.just(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"),
    st.binary(min_size=1, max_size=12),
)


@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), data=st.data())
@settings(max_examples=30)
def test_a_client_that_owes_bytes_has_a_deadline(
    requests: list[bytes], data: st.DataObject
) -> None:
    sent = b"".join(requests)
    cut = data.draw(st.integers(1, len(sent)))
    pieces = sorted(data.draw(st.lists(st.integers(0, cut), max_size=5)))

    async def attack() -> None:
        async with served() as (port, connections):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for start, end in zip([0, *pieces], [*pieces, cut], strict=True):
                writer.write(sent[start:end])
                await asyncio.sleep(0.001)
            for _ in range(20):
                await asyncio.sleep(0.001)
            for each in connections:
                if each.transport.is_closing():
                    continue
                # The app has answered all complete requests, so each client owes the next bytes.
                assert each._phase != "answer"
                assert each in connection._owing
                assert each._due is not None and each._timer is not None
                assert each._timer.when() <= each._due
            writer.close()

    asyncio.run(attack())
    assert not connection._owing, "a closed connection owes nothing"


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
SHORT = {"idle": 0.3, "head": 0.3, "body": 0.3}


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        return await reader.read()


@asynccontextmanager
async def connected(
    port: int, sent: bytes, **how: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect a client that has sent this."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **how)
    writer.write(sent)
    yield reader, writer
    writer.close()


async def answered(port: int, sent: bytes, **how: Any) -> list[bytes]:
    """Return the statuses of all answers on a new connection."""
    async with connected(port, sent, **how) as (reader, _):
        return statuses(await read_to_end(reader))


@pytest.mark.anyio
async def test_a_connection_whose_body_follows_its_answer_times_out() -> None:
    """Also if the answer comes before the body."""
    head = b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n"
    async with served(keep_alive_s=1) as (port, _), connected(port, head) as (reader, writer):
        assert (await reader.readuntil(b"x")).startswith(b"HTTP/1.1 200")
        writer.write(b"12345")
        assert await read_to_end(reader) == b"\r\n0\r\n\r\n"


@pytest.mark.anyio
async def test_between_requests_a_connection_stays_open_as_long_as_the_server_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise an unsolicited 408 would be taken for the answer to the next request."""
    monkeypatch.setattr(connection, "SECONDS", SHORT)
    async with served(keep_alive_s=2) as (port, _), connected(port, b"") as (reader, writer):
        for _ in range(2):
            writer.write(GET)
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.5)
        assert await read_to_end(reader) == b""


PAUSE_SECONDS = 4.0


def serve_until_killed(port: multiprocessing.connection.Connection) -> None:
    async def serve() -> None:
        async with served(keep_alive_s=2) as (number, _):
            port.send(number)
            await asyncio.Event().wait()

    connection.SECONDS = {"idle": 2.0, "head": 2.0, "body": 2.0}
    uvloop.run(serve())


def test_what_came_while_the_worker_was_paused_is_read_first() -> None:
    """After `docker unpause`, a client that has sent everything in time gets its answer."""
    spawning = multiprocessing.get_context("spawn")
    parent, child = spawning.Pipe()
    server = spawning.Process(target=serve_until_killed, args=[child], daemon=True)
    server.start()
    assert server.pid is not None
    address = ("127.0.0.1", parent.recv())
    post = LAST.replace(b"GET", b"POST")[:-2] + b"Content-Length: 1\r\n\r\n"
    cases = [(b"", LAST), (LAST[:9], LAST[9:]), (post, b"1"), (GET, LAST)]
    with ExitStack() as clients:
        sockets = [clients.enter_context(socket.create_connection(address)) for _ in cases]
        for client, (first, _) in zip(sockets, cases, strict=True):
            client.sendall(first)
        earlier = b""
        while not earlier.endswith(b"0\r\n\r\n"):
            earlier += sockets[-1].recv(4096)
        freeze(server.pid)
        for client, (_, rest) in zip(sockets, cases, strict=True):
            client.sendall(rest)
        time.sleep(PAUSE_SECONDS)
        os.kill(server.pid, signal.SIGCONT)
        for client in sockets:
            client.settimeout(20)
            assert b" 200 " in client.recv(4096)
    server.kill()
    server.join()


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (b"", []),
        (b"\r\n", []),
        (b"G", [b"408"]),
        (GET + b"G", [b"200", b"408"]),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n1", [b"408"]),
        (b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n1", [b"200"]),
        (GET + b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n1", [b"200", b"408"]),
        (b"POST /early HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", [b"200"]),
    ],
)
def test_only_a_request_that_is_not_answered_gets_a_408(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, answers: list[bytes]
) -> None:
    monkeypatch.setattr(connection, "SECONDS", SHORT)
    assert statuses(asyncio.run(exchanged(sent))) == answers


def test_bytes_that_the_server_does_not_read_time_out_no_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the first answer runs, only a part of the second request's body is read."""
    monkeypatch.setattr(connection, "SECONDS", {"idle": 30.0, "head": 30.0, "body": 0.5})
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.8)
    monkeypatch.setattr(connection, "HELD_SECONDS", 0.1)  # as short as the others
    first = b"GET /soon/1 HTTP/1.1\r\nHost: a\r\n\r\n"
    second = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 300000\r\n\r\n"
    answer = asyncio.run(exchanged(first + second + b"x" * 300_000))
    assert statuses(answer) == [b"200", b"200"]


@pytest.mark.anyio
async def test_a_body_is_not_late_before_it_is_read_again() -> None:
    """Its time limit may end between the first answer and the next read."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 300000\r\n\r\n"
    async with served() as (port, connections):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n" + head + b"x" * 300_000)
            while not any(each.pipeline and not each._unparsed for each in connections):
                await asyncio.sleep(0.001)
            (each,) = connections
            each.flow.resume_reading()
            for is_refused in (False, True):  # nothing arrives for as long a second time
                each._due = asyncio.get_running_loop().time()
                each._check_due()
                assert (each._last_word is not None) == is_refused


CHUNKED = b"Transfer-Encoding: chunked\r\n"
FRAMED = {
    "nothing": (b"GET", b"", b""),
    "a length": (b"POST", b"Content-Length: %d\r\n" % len(GET), GET),
    "chunks": (b"POST", CHUNKED, chunked([GET, b"a", b"bc"])),
    "coded chunks": (b"POST", b"Transfer-Encoding: gzip\r\n" + CHUNKED, chunked([GET])),
    "no known end": (b"POST", b"Transfer-Encoding: gzip\r\n", b"abc"),
}


@pytest.mark.parametrize("framed", FRAMED)
@pytest.mark.parametrize(("protocol", "size"), [(b"h2c", 1), (b"websocket", 7), (b"h2c", 10_000)])
def test_a_request_to_upgrade_is_answered_in_http_1_1(
    framed: str, protocol: bytes, size: int
) -> None:
    """`curl --http2` and Java's client ask for HTTP/2 in a request with a body, which belongs to
    that request."""
    method, lines, body = FRAMED[framed]
    lines = b" /echo HTTP/1.1\r\nHost: a\r\nUpgrade: " + protocol + b"\r\n" + lines
    last = b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"

    def answer(wanted: bytes) -> bytes:
        one = method + lines + b"Connection: " + wanted + b"\r\n\r\n" + body
        return asyncio.run(exchanged(one * 2 + last, size=size))

    upgraded = answer(b"Upgrade")
    assert upgraded == answer(b"keep-alive")
    is_coded = framed in ("coded chunks", "no known end")
    assert statuses(upgraded) == ([b"501"] if is_coded else [b"200"] * 3)


def test_a_trailer_is_not_added_to_the_headers() -> None:
    """It could carry a token or another host."""
    head = (
        b"POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    body = b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nHost: b\r\n\r\n"
    answer = asyncio.run(exchanged(head + body))
    assert statuses(answer) == [b"200"] and b"host,connection,transfer-encoding" in answer
    assert b"authorization" not in answer and answer.count(b"host") == 1


@pytest.mark.parametrize("lines", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_a_trailer_does_not_close_the_connection(lines: bytes) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\n" + lines + b"Transfer-Encoding: chunked\r\n\r\n"
    chunks = b"3\r\nabc\r\n0\r\nConnection: close\r\n\r\n"
    assert statuses(asyncio.run(exchanged(head + chunks + LAST))) == [b"200", b"200"]
    assert statuses(asyncio.run(exchanged(LAST + LAST))) == [b"200"]


def test_a_client_of_1_0_gets_no_interim_answer() -> None:
    head = b"POST /echo HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc"
    assert statuses(asyncio.run(exchanged(head))) == [b"200"]


Passes = Callable[[float], Awaitable[None]]


@asynccontextmanager
async def stuck(patience_s: float) -> AsyncIterator[tuple[WorkerProtocol, Mock, list[str], Passes]]:
    """Yield a connection whose client reads nothing unless the test sets `n_left`, its transport,
    the reasons of cut-offs, and a function that advances the fake clock."""
    now = 0.0

    async def passes(seconds: float) -> None:
        nonlocal now
        for _ in range(20):  # call what is due, and what follows from it
            now += seconds / 20
            await asyncio.sleep(0)

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    cuts: list[str] = []
    make: Any = protocol_with(patience_s, cuts.append)
    protocol, transport = make(config, uvicorn.server.ServerState(), {}), Mock(n_left=9)
    transport.get_write_buffer_size = lambda: transport.n_left
    transport.is_closing = lambda: transport.close.called
    transport.get_extra_info.return_value = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        protocol.connection_made(transport)
        yield protocol, transport, cuts, passes
        protocol.connection_lost(None)


@pytest.mark.anyio
@pytest.mark.parametrize("n_taken", [0, 4])
async def test_a_client_that_does_not_read_the_last_bytes_is_cut_off(n_taken: int) -> None:
    """Even if they are few, the connection is being closed, and some were read."""
    async with stuck(0.05) as (protocol, transport, cuts, passes):
        protocol.data_received(b"not HTTP\r\n\r\n")
        assert protocol.transport.is_closing()
        if n_taken:
            protocol.pause_writing()
            transport.n_left -= n_taken
            protocol.resume_writing()
        await passes(0.2)
        assert transport.abort.called and cuts == ["no_http", "unread_answer"]


@pytest.mark.anyio
async def test_a_client_that_reads_a_byte_in_time_is_not_cut_off() -> None:
    async with stuck(0.1) as (protocol, transport, cuts, passes):
        protocol.pause_writing()
        for _ in range(5):
            await passes(0.06)
            transport.n_left -= 1
        assert protocol in connection._unread and not cuts
        await passes(0.3)
        assert transport.abort.called and cuts == ["unread_answer"]
        assert protocol not in connection._unread


@pytest.mark.anyio
async def test_a_client_that_has_read_everything_is_not_watched() -> None:
    async with stuck(0.02) as (protocol, transport, cuts, passes):
        protocol.pause_writing()
        transport.n_left = 0
        await passes(0.1)
        assert protocol not in connection._unread and not cuts
        transport.n_left = 9
        protocol.pause_writing()
        protocol.resume_writing()
        await passes(0.1)
        assert protocol not in connection._unread and not cuts


@pytest.mark.parametrize("lines", [b"", b"Connection: keep-alive\r\n"])
@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
def test_a_client_that_knows_no_chunks_gets_none(version: bytes, lines: bytes) -> None:
    head = b"POST /echo HTTP/" + version + b"\r\n" + lines + b"Content-Length: 3\r\n\r\nabc"
    reply, _, body = asyncio.run(exchanged(head)).partition(b"\r\n\r\n")
    assert b"connection: close" in reply and b"transfer-encoding" not in reply
    assert body.startswith(b"[abc|") and body.endswith(b"]x")
    reply, _, body = asyncio.run(exchanged(head.replace(b"POST", b"HEAD"))).partition(b"\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200") and body == b""


def statuses(answers: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1.1 (\d+)", answers)


async def exchanged(sent: bytes, *, closes: bool = False, size: int = 0) -> bytes:
    """Return all answers to bytes that come at once, or in packets of `size`; a client that
    `closes` shuts down its sending side at once."""
    async with served() as (port, connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for start in range(0, len(sent), size) if size else ():
            while not connections:
                await asyncio.sleep(0)
            for each in connections:
                each.data_received(sent[start : start + size])
        if not size:
            writer.write(sent)
        if closes:
            writer.write_eof()
        answer = await read_to_end(reader)
        writer.close()
    return answer


@pytest.mark.anyio
async def test_pipelined_requests_of_a_client_that_left_never_begin() -> None:
    left.clear()
    async with served() as (port, connections):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        while not any(each._unanswered for each in connections):
            await asyncio.sleep(0.001)
        (each,) = connections
        each.transport.abort()
        async with asyncio.timeout(20):
            while not left:
                await asyncio.sleep(0.001)
        writer.close()
    assert left == ["/long"], "the others have not begun, and never do"


async def freed_by_itself(kept: weakref.ref[Any], writer: asyncio.StreamWriter) -> None:
    """Wait until it is freed without garbage collection, once its client has left."""
    gc.collect()
    gc.disable()
    try:
        writer.close()
        async with asyncio.timeout(20):
            while kept() is not None:
                await asyncio.sleep(0.001)
    finally:
        gc.enable()


@pytest.mark.anyio
async def test_a_pipelined_request_that_never_began_is_freed_at_once() -> None:
    async with served() as (port, connections):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
        while not any(each.pipeline for each in connections):
            await asyncio.sleep(0.001)
        (kept,) = [weakref.ref(each.cycle) for each in connections]
        await freed_by_itself(kept, writer)


@pytest.mark.anyio
async def test_a_connection_that_is_reset_between_requests_is_freed_at_once() -> None:
    async with served() as (port, connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")
        (kept,) = map(weakref.ref, connections)
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        await freed_by_itself(kept, writer)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
@pytest.mark.parametrize("sent", [b"\x16", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_failed_handshake_is_freed_at_once(sent: bytes, tmp_path: Path) -> None:
    async with served(certificate=own_certificate(tmp_path)) as (port, connections):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        while not connections:
            await asyncio.sleep(0.001)
        (kept,) = map(weakref.ref, connections)
        writer.write(sent)
        await freed_by_itself(kept, writer)


def test_a_half_closed_client_is_answered_but_not_waited_for() -> None:
    """Health checks by `nc -N` do this; a client that has left looks the same."""
    answer = asyncio.run(exchanged(b"GET /soon HTTP/1.1\r\nHost: a\r\n\r\n" * 2, closes=True))
    assert answer.count(b"HTTP/1.1 200") == 2
    left.clear()
    answer = asyncio.run(exchanged(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n", closes=True))
    assert (answer, left) == (b"", ["/long"])


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/large", "/slow"])
async def test_a_half_closed_client_that_reads_gets_the_whole_answer(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Also the part that it has not read when the time for half-closed connections is over."""
    monkeypatch.setattr(connection, "HALF_CLOSED_SECONDS", 0.3)
    head = b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode()
    async with served() as (port, _), connected(port, head, limit=2**16) as (reader, writer):
        writer.write_eof()
        n_read = n_pauses = 0
        while part := await reader.read(2**16):
            n_read += part.count(b"x") + part.count(b"y")
            if n_read >> 22 > n_pauses:
                n_pauses += 1
                await asyncio.sleep(0.1)
    assert n_read == (64 * 2**20 if path == "/large" else N_SLOW_PARTS) + 1


@pytest.mark.anyio
async def test_a_half_closed_client_that_reads_nothing_is_cut_off() -> None:
    async with served(patience_s=0.5) as (port, connections):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        writer.write_eof()
        while not connections:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            while connections:
                await asyncio.sleep(0.01)
        writer.close()


HUGE = b"Host: a\r\nContent-Length: 1000000000\r\n"
UPLOAD = b"POST /early HTTP/1.1\r\nConnection: close\r\n" + HUGE + b"\r\n"
REFUSED = {
    "an early answer": (UPLOAD, b"200"),
    "of 1.0": (b"POST /early HTTP/1.0\r\n" + HUGE + b"\r\n", b"200"),
    "a bad head": (b"POST /early HTTP/1.1\r\n" + HUGE + b"A\0: a\r\n\r\n", b"400"),
    "an endless head": (b"GET / HTTP/1.1\r\nA: ", b"431"),
    "bad chunks": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
    "requests behind the last": (LAST + GET, b"200"),
}


def uploaded(client: socket.socket, head: bytes, end: bytes | None = None) -> bytes:
    """Return the answer to a head followed by 20 MiB, complete or up to `end`."""
    with client:
        client.sendall(head)
        for _ in range(20):
            client.sendall(b"x" * 2**20)
        answer = b""
        while not (end and answer.endswith(end)) and (part := client.recv(2**16)):
            answer += part
        return answer


@pytest.mark.anyio
@pytest.mark.parametrize("refused", REFUSED)
async def test_a_client_that_is_still_sending_gets_the_answer(refused: str) -> None:
    """A reset of the connection would lose it."""
    head, status = REFUSED[refused]
    async with served() as (port, _):
        client = socket.create_connection(("127.0.0.1", port), timeout=20)
        assert statuses(await asyncio.to_thread(uploaded, client, head)) == [status]


@pytest.mark.anyio
async def test_a_client_that_is_still_sending_gets_the_answer_over_tls(tmp_path: Path) -> None:
    certificate = own_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=certificate)

    def upload(port: int) -> bytes:
        plain = socket.create_connection(("127.0.0.1", port), timeout=20)
        client = trusting.wrap_socket(plain, server_hostname="127.0.0.1")
        return uploaded(client, UPLOAD, b"0\r\n\r\n")

    async with served(certificate=certificate) as (port, _):
        assert statuses(await asyncio.to_thread(upload, port)) == [b"200"]


@pytest.mark.anyio
async def test_a_server_without_requests_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    n_ticks, plain = 0, uvicorn.Server.on_tick

    async def on_tick(server: uvicorn.Server, counter: int) -> bool:
        nonlocal n_ticks
        n_ticks += 1
        return await plain(server, counter)

    monkeypatch.setattr(uvicorn.Server, "on_tick", on_tick)
    server, loop = server_for(app, 30.0, lambda _: None), asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = loop.time()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.sleep(0.6)
        async with connected(listener.getsockname()[1], LAST) as (reader, _):
            assert b"date: " in await read_to_end(reader)
        server.end()
        await serving
    assert n_ticks <= 2 + loop.time() - began


@pytest.mark.anyio
async def test_new_clients_get_a_replaced_certificate(tmp_path: Path) -> None:
    certificate = own_certificate(tmp_path, ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"))
    first = ssl.create_default_context(cafile=certificate)
    (tmp_path / "next").mkdir()
    renewed = own_certificate(tmp_path / "next")
    second = ssl.create_default_context(cafile=renewed)
    async with (
        served(certificate=certificate) as (port, _),
        connected(port, GET, ssl=first) as (reader, writer),
    ):
        await reader.readuntil(b"x")
        certificate.write_bytes(renewed.read_bytes()[:700])
        assert await answered(port, LAST, ssl=first) == [b"200"], "it is only half there"
        certificate.write_bytes(renewed.read_bytes())
        assert await answered(port, LAST, ssl=second) == [b"200"]
        with pytest.raises(ssl.SSLCertVerificationError):
            await answered(port, LAST, ssl=first)
        writer.write(LAST)
        assert statuses(await read_to_end(reader)) == [b"200"], "who was there goes on"


@pytest.mark.parametrize(
    ("seconds", "n_bytes", "part"),
    [(0.5, 2**40, b"x" * 1000), (0.5, 2**40, b""), (60.0, 2**20, b"x" * 2**16)],
    ids=["endless", "silent", "much"],
)
@pytest.mark.anyio
async def test_a_client_that_is_still_sending_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch, seconds: float, n_bytes: int, part: bytes
) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", seconds)
    monkeypatch.setattr(connection, "LINGER_BYTES", n_bytes)
    async with served() as (port, connections), connected(port, UPLOAD) as (reader, writer):
        assert statuses(await read_to_end(reader)) == [b"200"]
        assert connections, "the client has the whole answer before the connection is closed"
        async with asyncio.timeout(10):
            while connections:
                writer.write(part)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("files_each", [1, 2])
@pytest.mark.parametrize("hard", [300, 1_000_000])
def test_connections_leave_descriptors_for_everything_else(
    files_each: int, hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft = 256

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        nonlocal soft
        soft, _ = limits

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    most = connection.most_connections(files_each)
    assert soft - 1 <= files_each * most + OTHER_FILES <= soft <= hard
    assert most == connection.MAX_CONNECTIONS or soft == hard


@pytest.mark.anyio
async def test_clients_that_are_still_sending_make_room_and_do_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 60.0)
    monkeypatch.setattr(connection, "most_connections", lambda _: 4)
    async with AsyncExitStack() as lingering, served() as (port, connections):
        for _ in range(4):
            reader, _ = await lingering.enter_async_context(connected(port, UPLOAD))
            assert statuses(await read_to_end(reader)) == [b"200"]
        assert await answered(port, LAST) == [b"200"]
        assert len(connections) == 3
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 10


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": each}) for each in (False, True)]
)
@pytest.mark.anyio
async def test_a_connection_without_a_handshake_counts(
    anyio_backend: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise they take all descriptors, and new connections are reset."""
    certificate = own_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(connection, "most_connections", lambda _: 4)
    async with served(certificate=certificate) as (port, connections):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        assert await answered(port, LAST, ssl=trusting) == [b"200"]
        closed = [await reader.read() for reader, _ in silent[:6]]
        assert closed == [b""] * 6 and len(connections) <= 4
        silent[-1][1].write(GET)
        with contextlib.suppress(ConnectionResetError):
            await silent[-1][0].read()
        assert await answered(port, LAST, ssl=trusting) == [b"200"]
        monkeypatch.setitem(connection.SECONDS, "idle", 0.1)
        assert await answered(port, b"") == []
        last = await asyncio.open_connection("127.0.0.1", port)
    for _, each in [*silent, last]:
        each.close()


def test_a_refusal_is_never_taken_for_the_answer_to_an_earlier_request() -> None:
    garbage = b"\0\r\n\r\n"
    no_path = b"GET http://127.0.0.1 HTTP/1.1\r\nHost: a\r\n\r\n"
    chunked_badly = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    too_large = b"GET / HTTP/1.1\r\nA: " + b"a" * 100_000
    coded = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: %s\r\n\r\n" + chunked([GET])
    earlier = b"GET /soon HTTP/1.1\r\nHost: a\r\n\r\n"
    for bad, status in [
        (garbage, b"400"),
        (no_path, b"400"),
        (chunked_badly, b"400"),
        (too_large, b"431"),
        (coded % b"gzip, chunked", b"501"),
        (coded % b"identity, chunked", b"501"),
        (coded % b"gzip\r\nTransfer-Encoding: chunked", b"501"),
        (coded % b"chunked\r\nContent-Length: 5", b"400"),
    ]:
        assert statuses(asyncio.run(exchanged(bad))) == [status]
        assert statuses(asyncio.run(exchanged(earlier * 2 + bad))) == [b"200", b"200", status]
        assert statuses(asyncio.run(exchanged(earlier + bad + earlier))) == [b"200", status]


@pytest.mark.parametrize(
    "form", [b"GET /%s HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nA: %s\r\n"], ids=["target", "header"]
)
def test_a_head_may_have_64_kib_and_no_byte_more(form: bytes) -> None:
    """Whatever comes in the same read, and however long the target is."""
    body = b"POST /early HTTP/1.1\r\nContent-Length: 5000\r\n\r\n" + b"b" * 5000
    form += b"Connection: close\r\n\r\n"
    n_least = len(form % b"")
    for n_bytes, status in [
        (connection.MAX_HEAD_BYTES, b"200"),
        (connection.MAX_HEAD_BYTES + 1, b"431"),
        (connection.MAX_HEAD_BYTES + connection.PARSED_AT_ONCE - 100, b"431"),
    ]:
        head = form % (b"a" * (n_bytes - n_least))
        assert statuses(asyncio.run(exchanged(head))) == [status]
        assert statuses(asyncio.run(exchanged(body + head))) == [b"200", status]


@pytest.mark.parametrize(("n_chunks", "status"), [(6, b"200"), (10, b"431")])
def test_the_framing_of_all_chunks_is_limited_together(n_chunks: int, status: bytes) -> None:
    """Without the head."""
    chunks = (b"1;" + b"a" * 10_000 + b"\r\nx\r\n") * n_chunks + b"0\r\n\r\n"
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 30_000 + b"\r\nConnection: close\r\n"
    head += CHUNKED + b"\r\n"
    assert statuses(asyncio.run(exchanged(head + chunks))) == [status]


def test_a_head_is_measured_without_what_came_before_it() -> None:
    large = b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 30_000 + b"\r\n"
    chunks = b"1;" + b"a" * 50_000 + b"\r\nx\r\n0\r\n\r\n"
    framed = b"POST / HTTP/1.1\r\nHost: a\r\n" + CHUNKED + b"\r\n" + chunks
    sent = (large + b"\r\n") * 3 + framed + large + b"Connection: close\r\n\r\n"
    assert statuses(asyncio.run(exchanged(sent))) == [b"200"] * 5


@pytest.mark.anyio
async def test_answers_that_nobody_reads_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "most_connections", lambda _: 8)
    async with served() as (port, connections):
        lazy = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        for client in lazy:
            client.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
        while len(connection._unread) < 8:
            await asyncio.sleep(0.01)
        for _ in range(3):
            assert await answered(port, LAST) == [b"200"]
        assert len(connections) == 7
        for client in lazy:
            client.close()


@pytest.mark.anyio
async def test_too_many_unread_bytes_cut_off_the_oldest_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 1)
    async with served() as (port, connections):
        clients = []
        for _ in range(3):
            before = set(connections)
            clients.append(socket.create_connection(("127.0.0.1", port)))
            clients[-1].sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            async with asyncio.timeout(10):
                while (
                    not (latest := set(connections) - before) or set(connection._unread) != latest
                ):
                    await asyncio.sleep(0.01)
        for client in clients:
            client.close()


@pytest.mark.anyio
async def test_one_task_continues_in_each_turn() -> None:
    turns, n_passed = OnePerTurn(), 0

    async def enter() -> None:
        nonlocal n_passed
        await turns.turn()
        n_passed += 1

    tasks = [asyncio.create_task(enter()) for _ in range(9)]
    await asyncio.sleep(0)
    tasks[4].cancel()
    async with asyncio.timeout(10):
        while n_passed < 8:
            before = n_passed
            await asyncio.sleep(0)
            assert n_passed - before <= 1
