"""Processes of their own beside a worker: connections that no client library makes, and streams.

`python -m tests.system.security.odd_connections attack PORT N SEED SECONDS` opens so many within
about that time and prints what became of them. `… streams PORT N` keeps so many streams running
until its stdin ends, and prints the tokens of each second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
PATHS = (b"/health", b"/info", b"/metrics", b"/v1/models", b"/nowhere", b"/", b"/openapi.json")
BODY = b'{"content":"Once upon a time"}'
ANSWER_SECONDS = 150.0
"""Longer than a worker waits for a body."""
N_TOKENS = 300
"""Of each stream."""


@dataclass
class Client:
    draw: random.Random
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def trickle(self, data: bytes, seconds: float) -> None:
        """In pieces with pauses between them."""
        while data:
            n = self.draw.randint(1, 1 + len(data) // 4)
            await self.send(data[:n])
            data = data[n:]
            await asyncio.sleep(self.draw.uniform(0, seconds / 4))

    async def leave(self) -> None:
        """By a reset, with whatever was to come."""
        if self.draw.random() < 0.5:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def end(self) -> bytes:
        """The beginning of what was answered."""
        return await self.reader.read(1 << 16)

    def request(self, *headers: bytes, method: bytes = b"GET", path: bytes = b"") -> bytes:
        path = path or self.draw.choice(PATHS)
        return b"%s %s HTTP/1.1\r\n%s%s\r\n" % (method, path, HOST, b"".join(headers))

    def post(self, *headers: bytes, body: bytes = BODY) -> bytes:
        length = b"Content-Length: %d\r\n" % len(body)
        return self.request(JSON, length, *headers, method=b"POST", path=b"/tokenize") + body

    def chunked(self, body: bytes) -> bytes:
        """With extensions and a trailer, in chunks of any size."""
        framed = b""
        while body:
            n = self.draw.randint(1, len(body))
            extension = self.draw.choice([b"", b";a", b";a=b", b';a="b;c"', b";" + b"x" * 200])
            framed += b"%x%s\r\n%s\r\n" % (n, extension, body[:n])
            body = body[n:]
        return framed + b"0\r\n" + self.draw.choice([b"", b"X-Trailer: 1\r\n"]) + b"\r\n"


async def slow(client: Client) -> bytes:
    await client.trickle(client.draw.choice([client.request(), client.post()]), 3)
    return await client.end()


async def broken(client: Client) -> bytes:
    whole = client.post()
    await client.send(whole[: client.draw.randrange(len(whole))])
    await asyncio.sleep(client.draw.uniform(0, 1))
    await client.leave()
    return b""


async def noise(client: Client) -> bytes:
    await client.send(client.draw.randbytes(client.draw.randint(1, 5000)))
    return await client.end()


async def odd(client: Client) -> bytes:
    """A request with a few bytes changed."""
    data = bytearray(client.post())
    for _ in range(client.draw.randint(1, 8)):
        data[client.draw.randrange(len(data))] = client.draw.choice(b"\r\n\0 :;,\xff0A")
    await client.send(bytes(data))
    return await client.end()


async def pipelined(client: Client) -> bytes:
    several = [client.request(), client.post(), client.request(method=b"HEAD")]
    await client.send(b"".join(client.draw.choices(several, k=20)))
    if client.draw.random() < 0.3:
        await client.leave()
        return b""
    return await client.end()


async def head(client: Client) -> bytes:
    await client.send(client.request(method=b"HEAD"))
    answer = await client.end()
    assert answer.partition(b"\r\n\r\n")[2] == b"", "an answer to HEAD has no body"
    return answer


async def expecting(client: Client) -> bytes:
    first, body = client.post(b"Expect: 100-continue\r\n").split(b"\r\n\r\n")
    await client.send(first + b"\r\n\r\n")
    if client.draw.random() < 0.3:
        await asyncio.sleep(client.draw.uniform(0, 1))
        await client.leave()
        return b""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5)
    await client.send(body)
    return await client.end()


async def upgrading(client: Client) -> bytes:
    to = client.draw.choice([b"websocket", b"h2c", b"TLS/1.0", b"x" * 300])
    more = (b"Connection: Upgrade\r\nUpgrade: %s\r\n" % to, b"Sec-WebSocket-Key: eA==\r\n")
    await client.send(client.draw.choice([client.request(*more), client.post(*more)]))
    await client.send(client.draw.randbytes(50))
    return await client.end()


async def in_chunks(client: Client) -> bytes:
    first = client.request(
        JSON, b"Transfer-Encoding: chunked\r\n", method=b"POST", path=b"/tokenize"
    )
    body = client.chunked(BODY)
    if client.draw.random() < 0.3:
        body = body[: client.draw.randrange(len(body))] + b"zz\r\n"
    await client.trickle(first + body, 1)
    return await client.end()


async def two_lengths(client: Client) -> bytes:
    more = [b"Transfer-Encoding: chunked\r\n", b"Content-Length: 3\r\n", b"Content-Length: -1\r\n"]
    await client.send(client.post(client.draw.choice(more)))
    return await client.end()


async def unread(client: Client) -> bytes:
    await client.send(client.request(path=b"/openapi.json") * 5)
    await asyncio.sleep(client.draw.uniform(0, 2))
    await client.leave()
    return b""


async def silent(client: Client) -> bytes:
    await asyncio.sleep(client.draw.uniform(0, 3))
    await client.leave()
    return b""


KINDS: tuple[Callable[[Client], Awaitable[bytes]], ...] = (
    *(slow, broken, noise, odd, pipelined, head, expecting, upgrading),
    *(in_chunks, two_lengths, unread, silent),
)


async def attack(port: int, n: int, seed: int, seconds: float) -> Counter[str]:
    """By kind and first status: `none` without an answer, `reset`, `late`."""
    outcomes: Counter[str] = Counter()

    async def one(number: int) -> None:
        draw = random.Random(f"{seed}-{number}")
        kind = draw.choice(KINDS)
        await asyncio.sleep(draw.uniform(0, seconds))
        try:
            client = Client(draw, *await asyncio.open_connection("127.0.0.1", port))
        except OSError:
            outcomes["refused"] += 1
            return
        try:
            answer = await asyncio.wait_for(kind(client), ANSWER_SECONDS)
            status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else ""
            assert status or not answer, answer[:100]
            outcomes[f"{kind.__name__} {status or 'none'}"] += 1
        except OSError:
            outcomes[f"{kind.__name__} reset"] += 1
        except TimeoutError:
            outcomes[f"{kind.__name__} late"] += 1
        finally:
            client.writer.transport.abort()

    async with asyncio.TaskGroup() as group:
        for number in range(n):
            group.create_task(one(number))
    return outcomes


async def streams(port: int, n: int) -> list[int]:
    """The tokens of each second, of all streams together. One that does not end well raises."""
    seconds: Counter[int] = Counter()
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    began = time.monotonic()

    async def one(number: int) -> None:
        while not ended.done():
            job = {
                "job_id": f"{number}-{time.monotonic_ns()}",
                "prompt": "Once",
                "max_tokens": N_TOKENS,
            }
            body = json.dumps(job | {"ignore_eos": True, "seed": number}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            headers = JSON + b"Connection: close\r\nContent-Length: %d\r\n" % len(body)
            writer.write(b"POST /execute HTTP/1.1\r\n" + HOST + headers + b"\r\n" + body)
            last = b""
            while line := await reader.readline():
                if line.startswith(b"event: token"):
                    seconds[int(time.monotonic() - began)] += 1
                last = line if line.startswith(b"event:") else last
            writer.close()
            assert last.strip() == b"event: end", last

    await asyncio.gather(*(one(number) for number in range(n)))
    return [seconds[second] for second in range(max(seconds) + 1)]


if __name__ == "__main__":
    what, port, n, *more = sys.argv[1:]
    if what == "attack":
        result = attack(int(port), int(n), int(more[0]), float(more[1]))
        print(json.dumps(asyncio.run(result)))
    else:
        print(json.dumps(asyncio.run(streams(int(port), int(n)))))
