"""The native answers: a job's events as server-sent events or JSON lines, or one object."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from worker.api.chat.answer import Answer
from worker.api.chat.choice import Choice
from worker.api.chat.delta import Delta, Text
from worker.api.dialects.native.schema import InferenceBody
from worker.api.http.encoding import json_line, quoted, rfc3339, sse
from worker.api.http.errors import error_head
from worker.api.http.operation import NDJSON, StreamForm
from worker.errors import WorkerError
from worker.wire.messages import Finished, Started


def error_event(error: WorkerError) -> dict[str, Any]:
    return {"type": "error", **error_head(error)}


EVENT_STREAM = StreamForm(
    lambda event: event.startswith((b"event: end\n", b"event: error\n")),
    lambda error, first, last: sse(error_event(error)),
)
LINE_STREAM = StreamForm(
    lambda line: line.startswith((b'{"type":"end"', b'{"type":"error"')),
    lambda error, first, last: json_line(error_event(error)),
)


class NativeAnswer(Answer[InferenceBody]):
    """Events in the contract's order: started, token* and metrics*, one end or error."""

    form = EVENT_STREAM
    token_head, token_tail = 'event: token\ndata: {"type":"token","t":', "]}\n\n"
    event: Callable[[dict[str, Any]], bytes] = staticmethod(sse)

    def __post_init__(self) -> None:
        self._n_sent = 0
        self._interval = self.state.settings.metrics_interval_ms / 1000
        self._metrics_due = 0.0

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        match delta:
            case Text(text, _, ids):
                # The hot path: formatting by hand is cheaper than a dict through `json.dumps`.
                listed = ",".join(map(str, ids))
                token = f'{self.token_head}{quoted(text)},"i":{self._n_sent},"ids":[{listed}'
                self._n_sent += 1
                return (token + self.token_tail).encode() + self._metrics(choice)
            case Started():
                self._metrics_due = time.monotonic() + self._interval
                return self.event(self._started(choice))
            case Finished():
                return self.event(self._end(choice))
            case _:
                return b""

    def is_numbered(self, event: bytes) -> bool:
        return event.startswith(b"event: token\n")

    def whole(self) -> dict[str, Any]:
        choice = self.choices[0]
        whole = self._started(choice) | {"text": choice.text, "tokens": choice.token_ids}
        whole |= self._end(choice)
        del whole["type"]
        return whole

    def _started(self, choice: Choice) -> dict[str, Any]:
        job = choice.job
        return {
            "type": "started",
            "job_id": job.job_id,
            "model": self.state.model_ref,
            "started_at": rfc3339(job.started_at_unix or time.time()),
            "seed": job.seed,
            "prompt_tokens": job.prompt_tokens,
            "cached_tokens": job.cached_tokens,
        }

    def _metrics(self, choice: Choice) -> bytes:
        if not self._interval or (now := time.monotonic()) < self._metrics_due:
            return b""
        self._metrics_due = now + self._interval
        job, info = choice.job, self.state.supervisor.info
        ms = job.decode_time_ms
        return self.event(
            {
                "type": "metrics",
                "job_id": job.job_id,
                "tokens_out": choice.tokens_out,
                "decode_time_ms": round(ms, 3),
                "tokens_per_sec": round((choice.tokens_out - 1) * 1000 / ms, 3) if ms else 0.0,
                "vram_bytes": info.residency.device_bytes if info is not None else 0,
            }
        )

    def _end(self, choice: Choice) -> dict[str, Any]:
        job, finished = choice.job, choice.finished
        assert finished is not None
        end: dict[str, Any] = {
            "type": "end",
            # Without the end-of-generation token, which no event contains.
            "tokens_out": finished.tokens_out - (finished.stop_reason == "EOS"),
            "decode_time_ms": round(finished.decode_time_ms, 3),
            "stop_reason": finished.stop_reason,
        }
        if finished.stop_sequence is not None:
            end["stop_sequence_matched"] = finished.stop_sequence
        end["seed"] = job.seed
        if job.engine_restarts:
            end["engine_restarts"] = job.engine_restarts
        return end


class NativeLines(NativeAnswer):
    """The same events, one JSON line each."""

    media_type = NDJSON
    form = LINE_STREAM
    token_head, token_tail = '{"type":"token","t":', "]}\n"
    event = staticmethod(json_line)
