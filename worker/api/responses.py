"""Answers that stream: the response that cancels and cuts, and the native events' encoding.

Runs on the API process's event loop. There is one `send` per engine frame, whatever number of
events it holds. A job is cancelled in `EventStream.__call__`'s `finally`, because a generator
whose client left while it was blocked in `send` is not told so.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from json.encoder import encode_basestring
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from worker.api.connection import ABORT
from worker.api.jobs import Job
from worker.api.state import AppState
from worker.errors import WorkerError
from worker.messages import Failed, Finished, Started, Token

KEEPALIVE = b": keep-alive\n\n"
_SSE_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
# Parsers built on str.splitlines() end a line at these; JSON need not escape them.
LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class EventStream(StreamingResponse):
    """A stream of encoded chunks that stays alive while silent and is cut when not read."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        state: AppState,
        close: Callable[[], None],
        media_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        super().__init__(chunks, headers=_SSE_HEADERS, media_type=media_type)
        self._close = close
        self._metrics = state.metrics
        sse = media_type.startswith("text/event-stream")
        self._keepalive = float(state.settings.keepalive) if sse else 0.0
        self._patience = float(state.settings.slow_reader_timeout)
        self._abort: Callable[[], None] | None = None
        self._blocked_since: float | None = None
        self._last_sent = 0.0
        self._extra: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._abort = (scope.get("extensions") or {}).get(ABORT)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()

    async def stream_response(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await self._send(
            send,
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        periods = [p for p in (self._keepalive, self._patience / 4) if p > 0]
        timer = _Ticker(loop, min(periods), lambda: self._tick(loop, send)) if periods else None
        try:
            async for chunk in self.body_iterator:
                if self._extra is not None:
                    await self._extra
                await self._send(
                    send, {"type": "http.response.body", "body": chunk, "more_body": True}
                )
        finally:
            if timer is not None:
                timer.stop()
        if self._extra is not None:
            await self._extra
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._last_sent = self._blocked_since = time.monotonic()
        await send(message)
        self._blocked_since = None

    def _tick(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        """Called from the loop's timer: cut a reader that blocks, speak when all is silent."""
        now = time.monotonic()
        if self._blocked_since is not None:
            if 0 < self._patience <= now - self._blocked_since:
                self._metrics.slow_reader_cut()
                if self._abort is not None:
                    self._abort()
        elif self._keepalive and now - self._last_sent >= 0.99 * self._keepalive:
            message = {"type": "http.response.body", "body": KEEPALIVE, "more_body": True}
            self._extra = loop.create_task(self._send(send, message))
            self._extra.add_done_callback(self._forget_extra)

    def _forget_extra(self, task: asyncio.Task[None]) -> None:
        self._extra = None


class _Ticker:
    """Calls back every `period` seconds until stopped; costs nothing per event."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, period: float, call: Callable[[], None]
    ) -> None:
        self._loop, self._period, self._call = loop, period, call
        self._handle = loop.call_later(period, self._run)

    def _run(self) -> None:
        self._handle = self._loop.call_later(self._period, self._run)
        self._call()

    def stop(self) -> None:
        self._handle.cancel()


@asynccontextmanager
async def closing_on_disconnect(request: Request, *jobs: Job) -> AsyncIterator[None]:
    """For answers that are not streamed: a client that leaves cancels its jobs."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for job in jobs:
            job.generation.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        for job in jobs:
            job.close()


# --- the worker's own events -------------------------------------------------------------


def sse(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


def ndjson(event: dict[str, Any]) -> bytes:
    return f"{dumps(event)}\n".encode()


def dumps(value: object) -> str:
    """Compact JSON in UTF-8 that holds no line break of any parser."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(LINE_BREAKS)


class NativeEvents:
    """One job's events in contract order: started, token* and metrics*, one end or error."""

    def __init__(self, job: Job, state: AppState, *, framed: bool) -> None:
        self._job = job
        self._state = state
        self._encode = sse if framed else ndjson
        head, tail = (b"event: token\ndata: ", b"\n\n") if framed else (b"", b"\n")
        self._token_head = head.decode() + '{"type":"token","t":'
        self._token_tail = "]}" + tail.decode()
        self._index = 0
        self._interval = state.settings.metrics_interval_ms / 1000
        self._metrics_due = 0.0

    async def chunks(self) -> AsyncIterator[bytes]:
        async for frame in self._job:
            yield b"".join(self._encoded(frame))

    def _encoded(self, frame: list[Any]) -> Iterator[bytes]:
        for event in frame:
            match event:
                case Token():
                    yield self._token(event)
                case Started():
                    self._metrics_due = time.monotonic() + self._interval
                    yield self._encode(started_event(self._job, self._state))
                case Finished():
                    yield self._encode(end_event(event, self._job))
                case Failed(error=error):
                    yield self._encode(error_event(error))
        if self._interval and isinstance(frame[-1], Token):
            now = time.monotonic()
            if now >= self._metrics_due:
                self._metrics_due = now + self._interval
                yield self._encode(metrics_event(self._job, self._state))

    def _token(self, event: Token) -> bytes:
        # The hot path: by hand, two to three times cheaper than a dict through `json.dumps`.
        text = encode_basestring(event.text)
        if not text.isascii():
            text = text.translate(LINE_BREAKS)
        index = self._index
        self._index = index + 1
        ids = ",".join(map(str, event.token_ids))
        return f'{self._token_head}{text},"i":{index},"ids":[{ids}{self._token_tail}'.encode()


def started_event(job: Job, state: AppState) -> dict[str, Any]:
    moment = datetime.fromtimestamp(job.started_at_unix or time.time(), UTC)
    return {
        "type": "started",
        "job_id": job.request.job_id,
        "model": state.model_ref,
        "started_at": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "seed": job.seed,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached_tokens,
    }


def metrics_event(job: Job, state: AppState) -> dict[str, Any]:
    decode_ms = job.decode_time_ms
    info = state.supervisor.info
    return {
        "type": "metrics",
        "job_id": job.request.job_id,
        "tokens_out": job.tokens_out,
        "decode_time_ms": round(decode_ms, 3),
        "tokens_per_sec": round((job.tokens_out - 1) * 1000 / decode_ms, 3) if decode_ms else 0.0,
        "vram_bytes": info.residency.device_bytes if info is not None else 0,
    }


def end_event(event: Finished, job: Job) -> dict[str, Any]:
    end: dict[str, Any] = {
        "type": "end",
        "tokens_out": event.tokens_out,
        "decode_time_ms": round(event.decode_time_ms, 3),
        "stop_reason": event.stop_reason,
    }
    if event.stop_sequence is not None:
        end["stop_sequence_matched"] = event.stop_sequence
    end["seed"] = job.seed
    return end


def error_event(error: WorkerError) -> dict[str, Any]:
    return {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "retriable": error.retriable,
    }


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(dumps(value).encode(), status, headers, "application/json")
