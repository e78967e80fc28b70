"""Streams that outlive their readers: what was encoded is kept, and a reader goes on where it was.

A stream is kept only if its request asks for it. Its events then go into a log beside its jobs, and
each reader, the first one too, reads the log from a place of its own: a byte offset, or behind an
event's id. A log is bounded in bytes; one that nobody reads goes after a time, and its jobs with
it. Only who sends the credential of the request that made a log can read it. On the event loop.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from itertools import chain

from worker.api.http.encoding import KEEPALIVE
from worker.errors import InferenceFailed, InvalidRequest, JobNotFound, WorkerError
from worker.observability.logs import get_logger
from worker.settings import Settings
from worker.supervisor.job import Job

MOST_BYTES = 4 * 2**20
"""Of one log; what is older is dropped."""
LEAST_BYTES = 16 * 1024
"""What a log counts at least: a short one is more than its bytes."""
_EVENTS_AT_ONCE = 512
_CHECKED_BYTES = 64 * 1024
"""A log may grow by so many bytes before its bounds are looked at."""
_log = get_logger()


class StreamLog:
    """The events of one answer. Those that the dialect numbers have an id: 0, 1, 2…"""

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
        self._is_sse = media_type.startswith("text/event-stream")
        self._is_numbered, self._failure = is_numbered, failure
        self._events: list[bytes] = []
        self._ends: list[int] = []
        """The byte offset behind each event."""
        self._numbers: list[int] = []
        """How many numbered events there are up to each event, itself included."""
        self._n_numbered = self._n_dropped = 0
        """Numbered events so far, and those of them that were dropped."""
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self.ended_at > 0

    @property
    def total_bytes(self) -> int:
        """Of all events so far, dropped ones too."""
        return self._ends[-1] if self._ends else self.dropped_bytes

    @property
    def size_bytes(self) -> int:
        return self.total_bytes - self.dropped_bytes

    def append(self, chunk: bytes) -> None:
        """Add whole events."""
        end = self.total_bytes
        for event in self._split(chunk):
            is_comment = event.startswith(b":")
            if self._is_sse and not is_comment and self._is_numbered(event):
                event = b"%sid: %d\n\n" % (event[:-1], self._n_numbered)
                self._n_numbered += 1
            end += len(event)
            self._events.append(event)
            self._ends.append(end)
            self._numbers.append(self._n_numbered)
        self._tell()

    def _split(self, chunk: bytes) -> Iterator[bytes]:
        border = b"\n\n" if self._is_sse else b"\n"
        for event in chunk.split(border):
            if event:
                yield event + border

    def drop(self, n_bytes: int) -> None:
        """Drop the oldest events, so many bytes of them at least."""
        n_events = bisect_left(self._ends, self.dropped_bytes + n_bytes) + 1
        n_events = min(n_events, len(self._ends))
        self.dropped_bytes = self._ends[n_events - 1]
        self._n_dropped = self._numbers[n_events - 1]
        for column in (self._events, self._ends, self._numbers):
            del column[:n_events]

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancel()

    def end(self) -> None:
        self.ended_at, self.jobs = time.time(), ()
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def behind(self, event_id: int) -> int:
        """The byte offset behind the event of that id.

        Raises:
            InvalidRequest: there is no such event, or it was dropped.
        """
        if not 0 <= event_id < self._n_numbered:
            raise InvalidRequest(
                f"Last-Event-ID: the stream has no event {event_id} so far", field="Last-Event-ID"
            )
        n_seen = event_id + 1
        if n_seen < self._n_dropped:
            raise _lost()
        if n_seen == self._n_dropped:
            return self.dropped_bytes
        return self._ends[bisect_left(self._numbers, n_seen)]

    async def read(self, offset: int) -> AsyncIterator[bytes]:
        """What follows an offset, until the stream ends."""
        while offset >= self.dropped_bytes:
            news = self._news
            first = bisect_right(self._ends, offset)
            some = self._events[first : first + _EVENTS_AT_ONCE]
            if some:
                end = self._ends[first + len(some) - 1]
                yield b"".join(some)[offset - end :]
                offset = end
            elif self.is_done:
                return
            else:
                await news.wait()
        yield self._failure(_lost())

    async def fill(
        self, chunks: AsyncIterator[bytes], grown: Streams, keepalive_seconds: float
    ) -> None:
        """Keep what a stream says, to its end; silence is broken as on any other stream."""
        silent = None
        if keepalive_seconds and self._is_sse:
            silent = asyncio.create_task(self._speak(keepalive_seconds))
        checked_bytes = 0
        try:
            async for chunk in chunks:
                self.append(chunk)
                if self.total_bytes - checked_bytes >= _CHECKED_BYTES:
                    checked_bytes = self.total_bytes
                    grown.bound(self)
        except Exception:
            _log.exception("stream.broken")
            fault = InferenceFailed("an internal error; the log names it by the correlation id")
            self.append(self._failure(fault))
        finally:
            if silent is not None:
                silent.cancel()
            self.cancel()
            self.end()

    async def _speak(self, seconds: float) -> None:
        while True:
            before = self.total_bytes
            await asyncio.sleep(seconds)
            if self.total_bytes == before:
                self.append(KEEPALIVE)


def _counted(log: StreamLog) -> int:
    return max(log.size_bytes, LEAST_BYTES)


def _lost() -> InvalidRequest:
    return InvalidRequest("this part of the stream is not kept any more; begin anew")


class Reader:
    """One reader of a log, for an `EventStream`, which cancels it when the client leaves."""

    def __init__(self, streams: Streams, log: StreamLog, offset: int) -> None:
        if not log.dropped_bytes <= offset <= log.total_bytes:
            raise (
                _lost()
                if offset < log.dropped_bytes
                else InvalidRequest(
                    f"from: the stream has {log.total_bytes} bytes so far", field="from"
                )
            )
        self.log, self._streams, self._is_reading = log, streams, True
        self.chunks = log.read(offset)
        log.n_readers += 1
        streams.watch(log)

    def cancel(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.log.n_readers -= 1
            self._streams.watch(self.log)


class Streams:
    """The logs by their owner and their names: a conversation's, and the answer's id."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._logs: dict[tuple[str, str], StreamLog] = {}
        self._timers: dict[StreamLog, asyncio.TimerHandle] = {}
        self._kept: dict[StreamLog, tuple[tuple[str, str], ...]] = {}
        """The logs in order of their beginning, and what each is found by."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def are_kept(self) -> bool:
        return self._settings.resume_seconds > 0

    def open(
        self,
        owner: str,
        names: Collection[str],
        log: StreamLog,
        chunks: AsyncIterator[bytes],
    ) -> None:
        """Keep a stream under these names. An older one of the same name ends."""
        for name in names:
            self.remove(owner, name)
        self._kept[log] = tuple((owner, name) for name in dict.fromkeys(names))
        self._logs |= dict.fromkeys(self._kept[log], log)
        self._make_room((len(self._kept) * LEAST_BYTES) - self._most_bytes)
        task = asyncio.create_task(log.fill(chunks, self, self._settings.keepalive))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self.watch(log))

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

    def watch(self, log: StreamLog) -> None:
        """Start, or stop, the time after which a log without a reader goes."""
        if (timer := self._timers.pop(log, None)) is not None:
            timer.cancel()
        if log.n_readers or log not in self._kept:
            return
        loop, seconds = asyncio.get_running_loop(), self._settings.resume_seconds
        self._timers[log] = loop.call_later(seconds, self._forget, log)

    def bound(self, log: StreamLog) -> None:
        """Drop what is too much after a log has grown: its own oldest events; then whole logs that
        have ended and that nobody reads; then the oldest events of the largest."""
        if log.size_bytes > MOST_BYTES:
            log.drop(log.size_bytes - 3 * MOST_BYTES // 4)
        excess = self._make_room(sum(map(_counted, self._kept)) - self._most_bytes)
        if excess > 0:
            largest = max(self._kept, key=lambda each: each.size_bytes)
            largest.drop(max(excess, largest.size_bytes // 4))

    @property
    def _most_bytes(self) -> int:
        return self._settings.resume_mib << 20

    def _make_room(self, excess: int) -> int:
        """Forget the oldest logs that have ended and that nobody reads; returns the bytes that are
        still too many."""
        unread = (each for each in self._kept if each.is_done and not each.n_readers)
        while excess > 0 and (oldest := next(unread, None)) is not None:
            excess -= _counted(oldest)
            self._forget(oldest)
            unread = (each for each in self._kept if each.is_done and not each.n_readers)
        return excess

    def _forget(self, log: StreamLog) -> None:
        for key in self._kept.pop(log, ()):
            del self._logs[key]
        if (timer := self._timers.pop(log, None)) is not None:
            timer.cancel()
        log.cancel()
