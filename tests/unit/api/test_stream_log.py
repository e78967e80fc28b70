"""Kept streams: how many are kept, and from where they are found."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from worker.api.http.stream_log import LEAST_BYTES, StreamLog, Streams
from worker.errors import InvalidRequest
from worker.settings import Settings


def test_dropped_events_are_refused_and_the_others_found() -> None:
    log = StreamLog((), "text/event-stream", lambda _: True, lambda _: b"event: error\n\n")
    for index in range(50):
        log.append(b"data: %d\n\n" % index)
    everything, total = bytes(log._kept), log.total_bytes
    log.drop(100)
    assert total - log.size_bytes < 100 + 20
    assert log.dropped_bytes >= 100 and log.size_bytes == total - log.dropped_bytes
    n_dropped = everything[: log.dropped_bytes].count(b"data")
    with pytest.raises(InvalidRequest, match="no longer kept"):
        log.offset_after(n_dropped - 2)
    for event_id in range(n_dropped - 1, 50):
        rest = everything[log.offset_after(event_id) :]
        assert rest.count(b"data") == 49 - event_id


async def kept(streams: Streams, *names: str, n_bytes: int) -> StreamLog:
    """A finished stream of one event."""

    async def one_event() -> AsyncIterator[bytes]:
        yield b"data: " + b"x" * n_bytes + b"\n\n"

    log = StreamLog((), "text/event-stream", lambda _: True, lambda _: b"")
    streams.open("o", names, log, one_event())
    while not log.is_done:
        await asyncio.sleep(0)
    return log


@pytest.mark.anyio
async def test_kept_short_streams_are_bounded_and_looked_up_in_order() -> None:
    streams = Streams(Settings(resume_mib=1))
    for index in range(100):
        await kept(streams, f"a{index % 90}::m", f"a::b{index}::c", n_bytes=1)
    lookups = (["a95::m"], ["a5", "a9", "", "a"], ["a::b99", "a::b0"])
    none, firsts, whole = ([name for name, _ in streams.named("o", ids)] for ids in lookups)
    n_kept = sum(name.startswith("a::b") for name in firsts)
    assert n_kept == 1024 * 1024 // LEAST_BYTES
    assert (none, firsts[:2], whole) == ([], ["a5::m", "a9::m"], ["a::b99::c"])


@pytest.mark.anyio
async def test_kept_streams_are_bounded_by_their_bytes_oldest_first() -> None:
    streams = Streams(Settings(resume_mib=1))
    logs = [await kept(streams, str(index), n_bytes=60_000) for index in range(60)]
    left = [log for log in logs if log in streams._logs.values()]
    assert left == logs[-len(left) :] and sum(log.size_bytes for log in left) <= 1 << 20
    assert len(left) > 10
