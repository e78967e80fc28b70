"""A strict reader of server-sent events, and the contract's order of a worker's stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stream:
    """The whole answer of one `/execute`, checked against the contract's order."""

    events: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == name]

    @property
    def text(self) -> str:
        return "".join(event["t"] for event in self.named("token"))

    @property
    def ids(self) -> list[int]:
        return [token for event in self.named("token") for token in event["ids"]]

    @property
    def end(self) -> dict[str, Any]:
        """The terminal event, which must be an `end`."""
        assert self.events[-1]["type"] == "end", self.events[-1]
        return self.events[-1]

    @property
    def error(self) -> dict[str, Any]:
        """The terminal event, which must be an `error`."""
        assert self.events[-1]["type"] == "error", self.events[-1]
        return self.events[-1]

    def check(self) -> Stream:
        """Check `started` → `token`* mixed with `metrics`* → exactly one of `end` / `error`."""
        names = [event["type"] for event in self.events]
        assert names, "an empty stream"
        assert names[-1] in ("end", "error"), f"no terminal event: {names[-3:]}"
        assert not {"end", "error"} & set(names[:-1]), f"more than one terminal event: {names}"
        if names[-1] == "end" or len(names) > 1:
            assert names[0] == "started", f"the first event is {names[0]}"
        assert set(names[1:-1]) <= {"token", "metrics"}, f"an unknown event in {set(names)}"
        indices = [event["i"] for event in self.named("token")]
        assert indices == list(range(len(indices))), "token indices have a gap"
        assert all(event["t"] for event in self.named("token")), "an empty token text"
        return self


def parse(lines: Iterable[str]) -> Iterator[dict[str, Any] | None]:
    """Yield events as dicts, each checked for `event:` = `type`; `None` for a comment."""
    name: str | None = None
    data: list[str] = []
    for line in lines:
        if line.startswith(":"):
            yield None
        elif line.startswith("event: "):
            assert name is None, "two event lines in one event"
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif line == "":
            if data:
                event = json.loads("\n".join(data))
                assert event["type"] == name, f"event: {name}, but type {event['type']}"
                yield event
            name, data = None, []
        else:
            raise AssertionError(f"not a line of server-sent events: {line!r}")


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines split only at \\n, decoded strictly: a split character is an error of the sender."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode("utf-8")
    assert rest == b"", f"the stream broke off in {rest[:80]!r}"


def collect(chunks: Iterable[bytes]) -> Stream:
    """Read a whole stream and check its order."""
    stream = Stream()
    for event in parse(lines_of(chunks)):
        if event is None:
            stream.comments += 1
        else:
            stream.events.append(event)
    return stream.check()
