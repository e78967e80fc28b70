"""One request to one worker, over its own HTTP/1.1 connection.

Runs on the gateway's event loop. Each request opens a new connection. This way, a failed connect
means that the worker never saw the request, and no request is sent on a closing connection.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httptools

from worker.errors import QueueFull
from worker.sockets import uri_of

CONNECT_SECONDS = 3.0
FETCH_SECONDS = 5.0
BRIEF_SECONDS = 0.5
_READ_BYTES = 64 * 1024
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade",
     b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"date", b"server")
)  # fmt: skip
"""Headers of a single connection (RFC 9110, 7.6.1), and those that each server sets itself."""

_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Error numbers of a connect that fails because this process or machine lacks resources."""

Headers = list[tuple[bytes, bytes]]


class NotReached(Exception):
    """No connection could be opened: the worker has not seen the request."""


class Lost(Exception):
    """The connection ended before the answer did."""


class Exchange:
    """A request in progress, and its response. Any code on the event loop may call `abort`."""

    status = 0
    """The response's status, once `head` has returned."""
    content = b""
    """The whole body, once `body` has returned."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, has_body: bool
    ) -> None:
        """`has_body`: whether the response can have a body; after a HEAD it cannot."""
        self._reader, self._writer, self._has_body = reader, writer, has_body
        self._parser = httptools.HttpResponseParser(self)
        self._is_whole = False
        self._parts: list[bytes] = []
        self.headers: Headers = []

    @classmethod
    @asynccontextmanager
    async def begin(
        cls, host: str, port: int, method: str, target: bytes, headers: Headers, body: bytes
    ) -> AsyncIterator[Exchange]:
        """Send a request, which is aborted at the end of the block if it is still in progress.

        Raises `NotReached` if the connect fails or takes longer than three seconds, and `QueueFull`
        if this side lacks the resources for a connection, whatever the worker's state is.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                message = f"no connection to a worker can be opened: {error.strerror}"
                raise QueueFull(message, retry_after_seconds=1) from None
            raise NotReached(str(error)) from None
        lines = [method.encode() + b" " + target + b" HTTP/1.1"]
        lines += (name + b": " + value for name, value in headers)
        if body or method == "POST":
            lines.append(b"content-length: %d" % len(body))
        lines += [b"connection: close", b"", b""]
        writer.write(b"\r\n".join(lines) + body)
        del body  # it may be large, and the response may take minutes
        exchange = cls(reader, writer, has_body=method != "HEAD")
        try:
            yield exchange
        finally:
            exchange.abort()
            del exchange._parser  # it refers to the exchange, and so keeps the response alive

    async def head(self) -> None:
        """Read the status line and headers; raises `Lost` if the worker closes the connection."""
        while not self.status:
            await self._more()

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def chunk(self) -> bytes | None:
        """What has arrived of the body since the last call; `None` after its end. Raises `Lost`."""
        while not self._parts:
            if self._is_whole:
                return None
            await self._more()
        chunk = b"".join(self._parts)
        self._parts.clear()
        return chunk

    async def body(self) -> bytes:
        """The rest of the body; raises `Lost` as `chunk` does."""
        parts = []
        while (chunk := await self.chunk()) is not None:
            parts.append(chunk)
        self.content = b"".join(parts)
        return self.content

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _more(self) -> None:
        try:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                raise Lost("the worker closed the connection")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise Lost(str(error)) from None

    # --- callbacks of the parser ---------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if (name := name.lower()) not in HOP_BY_HOP:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._is_whole = not self._has_body

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_whole = True


async def fetch(
    address: tuple[str, int],
    method: str,
    path: str,
    headers: Headers | None = None,
    body: bytes = b"",
    *,
    is_brief: bool = False,
) -> Exchange | None:
    """Fetch a short response; `None` if it fails, or takes longer than five seconds, or half a
    second if `is_brief`.

    Raises `QueueFull` as `begin` does.
    """
    sent = headers or [(b"host", uri_of(*address).removeprefix("http://").encode())]
    try:
        async with (
            asyncio.timeout(BRIEF_SECONDS if is_brief else FETCH_SECONDS),
            Exchange.begin(*address, method, path.encode("latin-1"), sent, body) as exchange,
        ):
            await exchange.head()
            await exchange.body()
            return exchange
    except (NotReached, Lost, TimeoutError):
        return None
