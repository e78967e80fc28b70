"""Streams that outlive their readers: what was encoded is kept, and a reader goes on where it was.

A stream is kept only if its request asks for it. Its bytes then go into a log beside its jobs, and
each reader, the first one too, reads the log from a place of its own: a byte offset, or behind an
event's id. A log is bounded in bytes; one that nobody reads goes after a time, and its jobs with
it. Only who sends the credential of the request that made a log can read it. On the event loop.
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
"""Of one log; what is older is dropped."""
LEAST_BYTES = 16 * 1024
"""What a log counts at least: a short one is more than its bytes."""
_CHECKED_BYTES = 64 * 1024
"""A log may grow by so many bytes before its bounds are looked at."""
_log = get_logger()


class StreamLog:
    """The bytes of one answer. The events that its dialect numbers have an id: 0, 1, 2…"""

    def __init__(
        self,
        jobs: Iterable[Job],
        media_type: str,
        is_numbered: Callable[[bytes], bool],
        failure: Callable[[WorkerError], bytes],
    ) -> None:
        """`failure` makes the last event of a stream that fails."""
        self.jobs, self.media_type = tuple(jobs), media_type
        self.began_at, self.ended_at = time.time(), 0.0
        """Unix seconds; the end is 0 until then."""
        self.dropped_bytes = 0
        self.n_readers = 0
        self.timer: asyncio.TimerHandle | None = None
        """Removes a log that nobody reads."""
        self._is_sse = media_type.startswith("text/event-stream")
        self._is_numbered, self._failure = is_numbered, failure
        self._kept = bytearray()
        self._ends: list[int] = []
        """The byte offset behind each numbered event that was not dropped."""
        self._n_dropped = 0
        """Numbered events that were."""
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self.ended_at > 0

    @property
    def total_bytes(self) -> int:
        """Of all events so far, dropped ones too."""
        return self.dropped_bytes + len(self._kept)

    @property
    def size_bytes(self) -> int:
        return len(self._kept)

    @property
    def counted_bytes(self) -> int:
        return max(len(self._kept), LEAST_BYTES)

    def append(self, chunk: bytes) -> None:
        """Add whole events."""
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

    def behind(self, event_id: int) -> int:
        """The byte offset behind the event of that id.

        Raises:
            InvalidRequest: there is no such event, or it was dropped.
        """
        index = event_id - self._n_dropped
        if index >= len(self._ends):
            what = f"is {event_id}, an event that the stream does not have so far"
            raise refusal("Last-Event-ID", "maximum", what)
        if index < 0:
            raise _lost()
        return self._ends[index]

    def read(self, offset: int) -> AsyncIterator[bytes]:
        """What follows an offset, until the stream ends.

        Raises:
            InvalidRequest: it has no such offset, or not any more.
        """
        if offset < self.dropped_bytes:
            raise _lost()
        if offset > self.total_bytes:
            what = f"is {offset}, and the stream has {self.total_bytes} bytes so far"
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
        """Keep what a stream says, to its end; `grown` is called now and then meanwhile, and at
        that."""
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
    return InvalidRequest("this part of the stream is not kept any more; begin anew")


class Streams:
    """The logs by their owner and their names: a conversation's, and the answer's id."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._logs: dict[tuple[str, str], StreamLog] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(
        self, owner: str, names: Collection[str], log: StreamLog, chunks: AsyncIterator[bytes]
    ) -> None:
        """Keep a stream under these names. An older one of the same name ends."""
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
            JobNotFound: there is none, or it is another's.
        """
        if (log := self._logs.get((owner, name))) is None:
            raise JobNotFound("no stream of that name is kept")
        return log

    def named(self, owner: str, ids: Iterable[str]) -> Iterator[tuple[str, StreamLog]]:
        """The owner's streams of conversations: of an id, and of an id with `::` and a model. They
        come in the order of the ids; it takes one look at each log."""
        found: dict[str, list[tuple[str, StreamLog]]] = {id: [] for id in ids}
        for (each, name), log in self._logs.items():
            # Either of the id and the model may have `::` itself.
            parts = {name, name.partition("::")[0] or name, name.rpartition("::")[0] or name}
            if each == owner:
                for id in parts & found.keys():
                    found[id].append((name, log))
        return chain.from_iterable(found.values())

    def remove(self, owner: str, name: str) -> None:
        """End a stream and forget it, if there is one."""
        if (log := self._logs.get((owner, name))) is not None:
            self._forget(log)

    def reading(self, log: StreamLog, change: int) -> None:
        """A reader has come (1) or left (-1)."""
        log.n_readers += change
        self._watch(log)

    def _watch(self, log: StreamLog) -> None:
        """Start, or stop, the time after which a log without a reader goes."""
        if log.timer is not None:
            log.timer.cancel()
        if not log.n_readers and log in self._logs.values():
            loop, seconds = asyncio.get_running_loop(), self._settings.resume_seconds
            log.timer = loop.call_later(seconds, self._forget, log)

    def _bound(self, log: StreamLog) -> None:
        """Drop what is too much after a log has grown: its own oldest bytes; then whole logs that
        have ended and that nobody reads; then the oldest bytes of the largest."""
        if log.size_bytes > MOST_BYTES:
            log.drop(log.size_bytes - 3 * MOST_BYTES // 4)
        logs = list(dict.fromkeys(self._logs.values()))  # the oldest first
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
