"""The native stream: a job's events as server-sent events or as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

from worker.api.http.encoding import dumps, quoted, sse
from worker.api.http.operation import StreamForm
from worker.api.http.state import AppState
from worker.errors import WorkerError
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import Failed, Finished, Started, Token


def ndjson(event: dict[str, Any]) -> bytes:
    return f"{dumps(event)}\n".encode()


class NativeEvents:
    """One job's events in contract order: started, token* and metrics*, one end or error."""

    def __init__(self, job: Job, state: AppState, *, framed: bool) -> None:
        self._job = job
        self._state = state
        self._encode = sse if framed else ndjson
        head, tail = ("event: token\ndata: ", "\n\n") if framed else ("", "\n")
        self._token_head, self._token_tail = head + '{"type":"token","t":', "]}" + tail
        self._index = 0
        self._interval = state.settings.metrics_interval_ms / 1000
        self._metrics_due = 0.0

    async def chunks(self, frames: AsyncIterable[list[StreamEvent]]) -> AsyncIterator[bytes]:
        async for frame in frames:
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
        # The hot path: formatting by hand is cheaper than a dict through `json.dumps`.
        text = quoted(event.text)
        index = self._index
        self._index = index + 1
        ids = ",".join(map(str, event.token_ids))
        return f'{self._token_head}{text},"i":{index},"ids":[{ids}{self._token_tail}'.encode()


def started_event(job: Job, state: AppState) -> dict[str, Any]:
    moment = datetime.fromtimestamp(job.started_at_unix or time.time(), UTC)
    return {
        "type": "started",
        "job_id": job.job_id,
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
        "job_id": job.job_id,
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
    if job.engine_restarts:
        end["engine_restarts"] = job.engine_restarts
    return end


def error_event(error: WorkerError) -> dict[str, Any]:
    return {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "retriable": error.retriable,
    }


EVENT_STREAM = StreamForm(
    lambda event: event.startswith((b"event: end\n", b"event: error\n")),
    lambda error, first, last: sse(error_event(error)),
)
LINE_STREAM = StreamForm(
    lambda line: line.startswith((b'{"type":"end"', b'{"type":"error"')),
    lambda error, first, last: ndjson(error_event(error)),
)
