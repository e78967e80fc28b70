"""Streams that outlive their readers: the encoded events are kept, and a reader can resume.

A stream is kept only if its request asks for that. Its bytes then go into a log, and each reader,
including the first, reads the log from its own byte offset. A log is bounded in bytes. One without
a reader is removed after a time, which also ends its jobs. A log can be read only with the
credential of the request that created it. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from itertools import chain

from worker.api.http.event_stream import cancel_all
from worker.api.http.faults import refusal
from worker.errors import InferenceFailed, InvalidRequest, JobNotFound, WorkerError
from worker.observability.logs import get_logger
from worker.settings import Settings
from worker.supervisor.job import Job

MOST_BYTES = 4 * 2**20
"""The most bytes of one log; the oldest are dropped."""
LEAST_BYTES = 16 * 1024
"""The least that a log counts for: a short one takes more memory than its bytes."""
_CHECKED_BYTES = 64 * 1024
"""How many bytes a log may grow by between two checks of the limits."""
_log = get_logger()


class StreamLog:
    """The bytes of one answer. Events that its dialect numbers have the ids 0, 1, 2…"""

    def __init__(
        self,
        jobs: Iterable[Job],
        media_type: str,
        is_numbered: Callable[[bytes], bool],
        failure: Callable[[WorkerError], bytes],
    ) -> None:
        """`failure` builds the last event of a stream that fails."""
        self.jobs, self.media_type = tuple(jobs), media_type
        self.began_at, self.ended_at = time.time(), 0.0
        """Unix time in seconds; `ended_at` is 0 while the stream runs."""
        self.dropped_bytes = 0
        self.n_readers = 0
        self.timer: asyncio.TimerHandle | None = None
        """Removes a log that nobody reads."""
        self._is_sse = media_type.startswith("text/event-stream")
        self._is_numbered, self._failure = is_numbered, failure
        self._kept = bytearray()
        self._ends: list[int] = []
        """The byte offset after each numbered event that was not dropped."""
        self._n_dropped = 0
        """Number of dropped numbered events."""
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self.ended_at > 0

    @property
    def total_bytes(self) -> int:
        """Size of all events so far, including dropped ones."""
        return self.dropped_bytes + len(self._kept)

    @property
    def size_bytes(self) -> int:
        return len(self._kept)

    @property
    def counted_bytes(self) -> int:
        return max(len(self._kept), LEAST_BYTES)

    def append(self, chunk: bytes) -> None:
        """Append complete events."""
        if not self._is_sse:  # lines of JSON have no ids
            self._kept += chunk
        for event in filter(None, chunk.split(b"\n\n")) if self._is_sse else ():
            is_numbered = not event.startswith(b":") and self._is_numbered(event + b"\n\n")
            id = b"\nid: %d" % (self._n_dropped + len(self._ends)) if is_numbered else b""
            self._kept += event + id + b"\n\n"
            if is_numbered:
                self._ends.append(self.total_bytes)
        self._tell()

    def drop(self, n_bytes: int) -> None:
        del self._kept[:n_bytes]
        self.dropped_bytes += n_bytes
        n_events = bisect_left(self._ends, self.dropped_bytes)
        del self._ends[:n_events]
        self._n_dropped += n_events

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def offset_after(self, event_id: int) -> int:
        """The byte offset after the event with this id.

        Raises:
            InvalidRequest: there is no such event, or it was dropped.
        """
        index = event_id - self._n_dropped
        if index >= len(self._ends):
            what = f"is {event_id}, an event that the stream does not have yet"
            raise refusal("Last-Event-ID", "maximum", what)
        if index < 0:
            raise _lost()
        return self._ends[index]

    def read(self, offset: int) -> AsyncIterator[bytes]:
        """The bytes from `offset` to the end of the stream, as they are appended.

        Raises:
            InvalidRequest: the stream does not reach the offset yet, or has dropped it.
        """
        if offset < self.dropped_bytes:
            raise _lost()
        if offset > self.total_bytes:
            what = f"is {offset}, but the stream has only {self.total_bytes} bytes so far"
            raise refusal("from", "maximum", what)
        return self._read(offset)

    async def _read(self, offset: int) -> AsyncIterator[bytes]:
        while offset >= self.dropped_bytes:
            news = self._news
            if some := bytes(self._kept[offset - self.dropped_bytes :]):
                yield some
                offset += len(some)
            elif self.is_done:
                return
            else:
                await news.wait()
        yield self._failure(_lost())

    async def fill(self, chunks: AsyncIterator[bytes], grown: Callable[[StreamLog], None]) -> None:
        """Append a stream until it ends. Calls `grown` every `_CHECKED_BYTES` and at the end."""
        checked_bytes = 0
        try:
            async for chunk in chunks:
                self.append(chunk)
                if self.total_bytes - checked_bytes >= _CHECKED_BYTES:
                    checked_bytes = self.total_bytes
                    grown(self)
        except Exception:
            _log.exception("stream.broken")
            fault = InferenceFailed("an internal error; the log names it by the correlation id")
            self.append(self._failure(fault))
        finally:
            cancel_all(self.jobs)
            self.ended_at, self.jobs = time.time(), ()
            self._tell()
            grown(self)


def _lost() -> InvalidRequest:
    return InvalidRequest("this part of the stream is no longer kept; send the request again")


class Streams:
    """All logs by owner and name: the conversation's, if there is one, and the answer's id."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._logs: dict[tuple[str, str], StreamLog] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(
        self, owner: str, names: Collection[str], log: StreamLog, chunks: AsyncIterator[bytes]
    ) -> None:
        """Keep a stream under `names`, and end older streams of these names."""
        for name in names:
            self.remove(owner, name)
        self._logs |= {(owner, name): log for name in names}
        task = asyncio.create_task(log.fill(chunks, self._bound))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._watch(log))

    def find(self, owner: str, name: str) -> StreamLog:
        """
        Raises:
            JobNotFound: there is no such stream, or it belongs to another owner.
        """
        if (log := self._logs.get((owner, name))) is None:
            raise JobNotFound("no stream of that name is kept")
        return log

    def named(self, owner: str, ids: Iterable[str]) -> Iterator[tuple[str, StreamLog]]:
        """The owner's streams of the conversations `ids`, in that order. A name is an id, or an id
        with `::` and a model. Passes over the logs once."""
        found: dict[str, list[tuple[str, StreamLog]]] = {id: [] for id in ids}
        for (each, name), log in self._logs.items():
            # The id and the model may contain `::` themselves.
            parts = {name, name.partition("::")[0] or name, name.rpartition("::")[0] or name}
            if each == owner:
                for id in parts & found.keys():
                    found[id].append((name, log))
        return chain.from_iterable(found.values())

    def remove(self, owner: str, name: str) -> None:
        """End and forget the stream, if it exists."""
        if (log := self._logs.get((owner, name))) is not None:
            self._forget(log)

    def reading(self, log: StreamLog, change: int) -> None:
        """Count a reader that has come (1) or left (-1)."""
        log.n_readers += change
        self._watch(log)

    def _watch(self, log: StreamLog) -> None:
        """Start the timer that removes a log without readers, or stop it."""
        if log.timer is not None:
            log.timer.cancel()
        if not log.n_readers and log in self._logs.values():
            loop, seconds = asyncio.get_running_loop(), self._settings.resume_seconds
            log.timer = loop.call_later(seconds, self._forget, log)

    def _bound(self, log: StreamLog) -> None:
        """Enforce the limits after `log` has grown: drop its own oldest bytes; then whole logs that
        have ended and have no reader; then the oldest bytes of the largest log."""
        if log.size_bytes > MOST_BYTES:
            log.drop(log.size_bytes - 3 * MOST_BYTES // 4)
        logs = list(dict.fromkeys(self._logs.values()))  # oldest first
        excess = sum(each.counted_bytes for each in logs) - (self._settings.resume_mib << 20)
        for each in logs:
            if excess > 0 and each.is_done and not each.n_readers:
                excess -= each.counted_bytes
                self._forget(each)
        if excess > 0:
            largest = max(self._logs.values(), key=lambda each: each.size_bytes)
            largest.drop(min(max(excess, largest.size_bytes // 4), largest.size_bytes))

    def _forget(self, log: StreamLog) -> None:
        self._logs = {key: each for key, each in self._logs.items() if each is not log}
        if log.timer is not None:
            log.timer.cancel()
        cancel_all(log.jobs)
