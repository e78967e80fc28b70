"""Base of the tests' engines: a loop that the test drives, and the events it has sent, by
request."""

from __future__ import annotations

from collections import defaultdict

from worker.engine.cache.disk import Disk
from worker.engine.loop import Loop
from worker.supervisor.job import StreamEvent
from worker.wire.messages import Event, Failed, Finished, Started, Stats, Token


def opened(disk: Disk) -> Disk:
    """Return the disk tier once it has listed its files, which a start on a busy machine does not
    await."""
    disk._writer.submit(int).result()
    return disk


class Driven:
    loop: Loop

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = defaultdict(list)
        self.stats: Stats | None = None

    def receive(self, events: list[Event]) -> None:
        self.stats = next((event for event in events if isinstance(event, Stats)), self.stats)
        for event in events:
            if isinstance(event, StreamEvent):
                self.events[event.request_id].append(event)

    def turn(self) -> None:
        self.loop.call(lambda: None)  # a step of an idle loop would wait for work
        self.loop.turn()
        self.check()

    def check(self) -> None:
        """Check that the books match the backend."""
        raise NotImplementedError

    def text(self, request_id: int) -> str:
        return "".join(e.text for e in self.events[request_id] if isinstance(e, Token))

    def ids(self, request_id: int) -> list[int]:
        return [i for e in self.events[request_id] if isinstance(e, Token) for i in e.token_ids]

    def cached_tokens(self, request_id: int) -> int:
        (started,) = (each for each in self.events[request_id] if isinstance(each, Started))
        return started.cached_tokens

    def has_ended(self, request_id: int) -> bool:
        return isinstance(next(reversed(self.events[request_id]), None), Finished | Failed)

    def have_failed(self, *request_ids: int) -> bool:
        return all(isinstance(self.events[each][-1], Failed) for each in request_ids)

    def have_finished(self, *request_ids: int) -> bool:
        return all(isinstance(self.events[each][-1], Finished) for each in request_ids)
