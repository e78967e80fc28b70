"""A strict parser of event streams: it refuses what a lenient client would swallow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: dict[str, Any]


def parse(body: bytes) -> list[Event]:
    """The events of a whole stream; comments are dropped, anything odd is an error."""
    text = body.decode("utf-8")  # invalid UTF-8 raises
    assert text == "" or text.endswith("\n\n"), "the stream ends in the middle of an event"
    return list(_events(text.split("\n\n")[:-1]))


def comments(body: bytes) -> list[str]:
    return [line for line in body.decode().split("\n") if line.startswith(":")]


def _events(blocks: Iterable[str]) -> Iterator[Event]:
    for block in blocks:
        lines = block.split("\n")
        if all(line.startswith(":") for line in lines):
            continue
        assert len(lines) == 2, f"not one event line and one data line: {lines!r}"
        assert lines[0].startswith("event: ") and lines[1].startswith("data: "), lines
        name, data = lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))
        assert data["type"] == name, f"the data of {name} says {data['type']}"
        yield Event(name, data)


def assert_contract_order(events: list[Event]) -> None:
    """started → token* and metrics* → exactly one end or error, token indices without a gap."""
    names = [event.name for event in events]
    assert names[-1] in ("end", "error"), names
    assert not {"end", "error"} & set(names[:-1]), names
    if names != ["error"]:
        assert names[0] == "started", names
    assert set(names[1:-1]) <= {"token", "metrics"}, names
    indices = [event.data["i"] for event in events if event.name == "token"]
    assert indices == list(range(len(indices))), indices


def text_of(events: list[Event]) -> str:
    return "".join(event.data["t"] for event in events if event.name == "token")
