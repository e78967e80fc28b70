"""A separate process that times small HTTP requests, so that a test's own load is not measured.

`python -m tests.process.api.latency_probe PORT` asks `/health` on a kept connection until its stdin
ends and prints the times in milliseconds as JSON. `… serve` is the control: a server that
only answers, whose times show the delay of the machine itself.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import time

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
PAUSE_SECONDS = 0.004


def probe(port: int) -> list[float]:
    """Return the milliseconds of each request until stdin ends."""
    took_ms: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(120)
        while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
            began = time.perf_counter()
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(65536)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            while len(body) < length:
                body += connection.recv(65536)
            took_ms.append((time.perf_counter() - began) * 1000)
    return took_ms


async def serve() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        print(json.dumps(probe(int(sys.argv[1]))))
