"""Scripted workers on real sockets, and a gateway in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from worker.fleet.gateway import Gateway
from worker.fleet.settings import Fleet
from worker.fleet.workers import Worker, WorkerTable

Script = Callable[["Conversation"], Awaitable[None]]
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass
class Conversation:
    """One request to a scripted worker, and the worker's side of the connection."""

    line: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def stream(self, *chunks: bytes) -> None:
        self.writer.write(SSE_HEAD)
        for data in chunks:
            await self.chunk(data)

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def json(self, status: int, value: object, headers: str = "") -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()


def tells(status: int, value: object, headers: str = "") -> Script:
    """A script that answers every request with this JSON."""
    return lambda conversation: conversation.json(status, value, headers)


@dataclass
class ScriptedWorker:
    uri: str
    requests: list[Conversation] = field(default_factory=list)


@asynccontextmanager
async def scripted_worker(script: Script) -> AsyncIterator[ScriptedWorker]:
    """A worker that answers each connection by `script`, and then closes it. Remaining connections
    are closed with the worker, because an unclosed transport would warn in whichever test it is
    garbage-collected."""
    serving: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append((asyncio.create_task(serve(reader, writer)), writer))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            pairs = [line.split(": ", 1) for line in head[1:] if line]
            headers = {name.lower(): value for name, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            conversation = Conversation(head[0], headers, body, reader, writer)
            worker.requests.append(conversation)
            await script(conversation)
        finally:
            writer.close()

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    worker = ScriptedWorker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield worker
    finally:
        server.close()
        for _ in range(4):  # steps of the loop in which newly accepted connections begin
            await asyncio.sleep(0)
        for task, writer in serving:
            task.cancel()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await asyncio.gather(*(task for task, _ in serving), return_exceptions=True)


@dataclass
class Got:
    """What a client received from an ASGI application."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    gateway: Gateway,
    path: str,
    body: Mapping[str, Any] | bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    leave_after_chunks: int | None = None,
    method: str | None = None,
    query: bytes = b"",
    got: Got | None = None,
) -> Got:
    """Send one request; the client may leave after a number of chunks. `got` shows what has arrived
    so far."""
    got, left = got or Got(), asyncio.Event()
    text = body or b""
    if not isinstance(text, bytes):
        text = json.dumps(body).encode()
    sent: list[dict[str, Any]] = [{"type": "http.request", "body": text}]

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            got.status = message["status"]
            got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        if message.get("body"):
            got.chunks.append(message["body"])
        got.ended = not message.get("more_body", False)
        if leave_after_chunks is not None and len(got.chunks) >= leave_after_chunks:
            left.set()

    all_headers = {"host": "127.0.0.1:8000", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http", "method": method or ("GET" if body is None else "POST"), "path": path,
        "raw_path": path.encode(), "query_string": query, "http_version": "1.1",
        "headers": [(k.encode(), v.encode()) for k, v in all_headers.items()],
    }  # fmt: skip
    await gateway(scope, receive, send)
    return got


def at(uris: Mapping[str, str], group: str = "tiny", n_slots: int = 4) -> list[Worker]:
    """Workers for a table: id → address."""
    return [Worker(id, group, uri, n_slots, f"secret of {id}") for id, uri in uris.items()]


@asynccontextmanager
async def fleet_of(
    *scripts: Script, groups: tuple[str, ...] = ("tiny",)
) -> AsyncIterator[tuple[Gateway, WorkerTable, list[ScriptedWorker]]]:
    """A gateway in front of one worker per script, assigned to the groups in turn."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker(each)) for each in scripts]
        table = WorkerTable()
        for n, group in enumerate(groups):
            own = workers[n :: len(groups)]
            uris = {f"{group}-{i}": worker.uri for i, worker in enumerate(own)}
            table.replace(group, at(uris, group))
        entries = [{"name": name} for name in groups]
        fleet = Fleet.model_validate({"workers": entries, "max_body_bytes": 4 * 2**20})
        gateway = Gateway(table)
        gateway.use(fleet)
        yield gateway, table, workers
