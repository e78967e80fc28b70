"""The engine's frames, as tests read them."""

from __future__ import annotations

from worker.supervisor.job import StreamEvent
from worker.wire.messages import Event


def by_request(events: list[Event]) -> dict[int, list[StreamEvent]]:
    """One frame's events of each request, in order."""
    streams: dict[int, list[StreamEvent]] = {}
    for event in events:
        if isinstance(event, StreamEvent):
            streams.setdefault(event.request_id, []).append(event)
    return streams
