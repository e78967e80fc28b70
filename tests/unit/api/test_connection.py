"""A connection's phases: whoever owes something has a time in which it must come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.api.http import connection
from worker.api.http.connection import WorkerProtocol, protocol_with

left: list[str] = []
"""Paths of requests that were told that their client has left."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body unless the path says not to, and answers; under /long only once its client
    has left, and under /soon after a moment."""
    if scope["path"].startswith("/long"):
        while (await receive())["type"] != "http.disconnect":
            pass
        left.append(scope["path"])
    elif scope["path"].startswith("/soon"):
        await asyncio.sleep(0.05)
    elif not scope["path"].startswith("/early"):
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(64 if scope["path"].startswith("/large") else 0):
        await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
    await send({"type": "http.response.body", "body": b"x"})


@asynccontextmanager
async def served() -> AsyncIterator[tuple[int, set[WorkerProtocol]]]:
    """The port, and the connections of the server."""
    protocol: Any = protocol_with(30.0, lambda: None)
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        try:
            yield listener.getsockname()[1], server.server_state.connections  # type: ignore[misc]
        finally:
            server.should_exit = True
            await serving


def chunked(parts: list[bytes]) -> bytes:
    framed = [b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts if part]
    return b"".join(framed) + b"0\r\n\r\n"


BODY = st.binary(max_size=40)
PATH = st.sampled_from([b"/", b"/early"])
LINES = b"Host: a\r\n"
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
        st.sampled_from([b"", b"Expect: 100-continue\r\n", b"Connection: close\r\n"]),
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
def test_whoever_owes_something_has_a_time_for_it(
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
                # The app has answered all that came whole, so each client owes the next thing.
                assert each._phase != "answer"
                assert each in connection._owing
                assert each._due is not None and each._timer is not None
                assert each._timer.when() <= each._due
            writer.close()

    asyncio.run(attack())
    assert not connection._owing, "a closed connection owes nothing"


def test_a_body_that_comes_after_its_answer_leaves_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer came early and the body later: nothing closed such a connection any more."""
    monkeypatch.setattr(connection, "SECONDS", {"idle": 0.3, "head": 0.3, "body": 0.3})

    async def attack() -> None:
        async with served() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n")
            assert (await reader.readuntil(b"x")).startswith(b"HTTP/1.1 200")
            writer.write(b"12345")
            async with asyncio.timeout(20):
                left = await reader.read()
            writer.close()
            assert left.endswith((b"0\r\n\r\n", connection._TOO_SLOW))

    asyncio.run(attack())


def test_a_body_that_pauses_is_given_up_before_its_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "SECONDS", {"idle": 5.0, "head": 5.0, "body": 0.3})

    async def attack() -> None:
        async with served() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n1234")
            async with asyncio.timeout(20):
                assert await reader.read() in (b"", connection._TOO_SLOW)
            writer.close()

    asyncio.run(attack())


async def exchanged(sent: bytes, *, closes: bool = False) -> bytes:
    """All that is answered; a client that `closes` says at once that it sends nothing more."""
    async with served() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        if closes:
            writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
    return answer


def test_each_pipelined_request_is_told_that_its_client_has_left() -> None:
    left.clear()

    async def attack() -> None:
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

    asyncio.run(attack())
    assert left == ["/long"], "those behind it have not begun, and never do"


def test_a_client_that_sends_nothing_more_is_answered_but_not_waited_for() -> None:
    """Health checks by `nc -N` do that; who has left looks the same."""
    answer = asyncio.run(exchanged(b"GET /soon HTTP/1.1\r\nHost: a\r\n\r\n" * 2, closes=True))
    assert answer.count(b"HTTP/1.1 200") == 2
    left.clear()
    answer = asyncio.run(exchanged(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n", closes=True))
    assert (answer, left) == (b"", ["/long"])


def test_a_refusal_is_never_taken_for_the_answer_to_an_earlier_request() -> None:
    garbage = b"\0\r\n\r\n"
    assert asyncio.run(exchanged(garbage)) == connection._BAD_REQUEST
    earlier = b"GET /soon HTTP/1.1\r\nHost: a\r\n\r\n"
    assert asyncio.run(exchanged(earlier + garbage)) == b""
    chunked_badly = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert asyncio.run(exchanged(chunked_badly)) == connection._BAD_REQUEST
    assert asyncio.run(exchanged(earlier + chunked_badly)) == b""


def test_answers_that_nobody_reads_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "most_connections", lambda: 8)

    async def crowd() -> None:
        async with served() as (port, connections):
            lazy = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
            for client in lazy:
                client.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            while len(connection._unread) < 8:
                await asyncio.sleep(0.01)
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
            assert len(connections) == 7
            for client in lazy:
                client.close()

    asyncio.run(crowd())
