"""Lists the functions and objects that one streamed chat uses in the API process.

`python -m tools.walk` prints them. A real supervisor and the real HTTP surface serve one streamed
chat of the scripted engine, in one thread with a client that shares no code with the worker. Only
code and classes of `worker/` count: each function once, however often it runs, and each object; a
comprehension belongs to its function. The records of `worker/wire`, which native code creates, are
not counted.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from tests.support.supervised import supervised
from worker.api.app import build_schemas, create_app
from worker.api.http.server import server_for
from worker.api.http.state import AppState
from worker.observability.metrics import Metrics
from worker.settings import Settings
from worker.wire import async_channel
from worker.wire.async_channel import AsyncChannel
from worker.wire.messages import Command, Finished, Submit, Token
from worker.wire.transport import encode

WORKER = str(Path(__file__).resolve().parents[1] / "worker") + os.sep
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hold"}],
    "stream": True,
    "temperature": 0.5,
}


class Walk(NamedTuple):
    """The counts are of calls and of instances."""

    functions_in: Counter[str]
    """From the request's first byte to the first chunk of its answer, which has no token yet."""
    objects_in: Counter[str]
    functions_out: Counter[str]
    """For one frame with one token, from the pipe to the socket."""
    objects_out: Counter[str]


class _Pipe(AsyncChannel):
    """The pipe to the engine, into which a test can put frames of its own."""

    open_ones: ClassVar[list[_Pipe]] = []
    last_id = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.open_ones.append(self)

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self.last_id = command.request_id
        super().send(command)


class _Profile:
    """Counts the thread's calls while it is set."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.objects: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if made := _made(frame):
            self.objects[made] += 1
        if code.co_filename.startswith(WORKER) and not code.co_name.startswith("<"):
            place = code.co_filename.removeprefix(WORKER).removesuffix(".py")
            self.functions[f"{place}:{code.co_qualname}"] += 1

    def taken(self) -> tuple[Counter[str], Counter[str]]:
        found = self.functions, self.objects
        self.functions, self.objects = Counter(), Counter()
        return found


def _made(frame: FrameType) -> str | None:
    """Return the worker's class whose instance this call creates. A pydantic model is created by
    native code, which calls the one validator that all of them have."""
    code, back = frame.f_code, frame.f_back
    if not code.co_varnames:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    kind = first if isinstance(first, type) else type(first)
    is_record = code.co_name == "<lambda>" and code.co_varnames[0] == "_cls"
    if not is_record and code.co_name not in ("__init__", "_prepared"):
        return None
    inner = back is not None and back.f_code.co_name == "__init__"
    if inner and back is not None and first is back.f_locals.get("self"):
        return None  # a base class's part
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__[:7] == "worker." else None


@asynccontextmanager
async def served() -> AsyncIterator[tuple[int, _Pipe]]:
    """Serve an API over the scripted engine; yields its port and the pipe to the engine."""
    settings = Settings()
    async_channel.AsyncChannel = _Pipe  # type: ignore[misc]
    async with supervised() as supervisor:
        pipe = _Pipe.open_ones[-1]
        state = AppState(
            settings=settings,
            supervisor=supervisor,
            metrics=Metrics("w"),
            worker_id="w",
            model_ref="tiny",
            incarnation="",
            request_shutdown=lambda: None,
        )
        await build_schemas(state)
        server = server_for(create_app(state), settings.slow_reader_timeout, lambda _: None)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                yield listener.getsockname()[1], pipe
            finally:
                server.should_exit = True
                await serving


async def walk() -> Walk:
    """Return what three chats have in common, which leaves out code that runs by the clock."""
    async with served() as (port, pipe):
        for _ in range(3):  # the first makes everything that is made only once
            await _one_chat(port, pipe)
        chats = [await _one_chat(port, pipe) for _ in range(3)]
        return Walk(*(reduce(operator.and_, counters) for counters in zip(*chats, strict=True)))


async def _one_chat(port: int, pipe: _Pipe) -> Walk:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    profile = _Profile()
    sys.setprofile(profile)
    try:
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\n\n\r\n")
        assert b"200 OK" in answer and b'"role":"assistant"' in answer, answer
        found_in = profile.taken()
        request_id = pipe.last_id
        token = encode([Token(request_id, "word", (7,))])
        for _ in range(2):  # the second token: the first one of an answer is counted differently
            profile.taken()
            pipe.data_received(token)
            chunk = await reader.readuntil(b"\n\n\r\n")
            assert b'"content":"word"' in chunk, chunk
        found_out = profile.taken()
    finally:
        sys.setprofile(None)
    pipe.data_received(encode([Finished(request_id, "EOS", 2, 1.0)]))
    assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return Walk(*found_in, *found_out)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script"
        script.write_text("ok\n")
        os.environ["SCRIPTED_ENGINE"] = str(script)
        found = asyncio.run(walk())
    for name, counter in found._asdict().items():
        print(f"{name}: {len(counter)} different, {counter.total()} in all")
        for place, count in counter.items():
            print(f"    {count:3} {place}")


if __name__ == "__main__":
    main()
