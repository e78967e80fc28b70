"""Sends a request, and reads the answer as one value, whether streamed or whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to both servers."""

    path: str
    body: Any = None
    """The body; `None` makes it a GET."""

    def __str__(self) -> str:
        return self.path if self.body is None else f"{self.path} {json.dumps(self.body)}"


@dataclass(frozen=True, slots=True)
class Answered:
    status: int | str
    """The HTTP status; `ended` if the server has exited."""
    whole: Any = None
    """The answer's JSON, or its text."""
    events: list[Any] = field(default_factory=list)
    """The data of a stream's events or lines."""

    @property
    def comparable(self) -> dict[str, Any]:
        """Normalise an answer: a stream becomes the sum of its events."""
        if self.events:
            return {"status": self.status, "stream": summed(self.events)}
        return {"status": self.status, "answer": self.whole}


def answered(client: httpx.Client, url: str, asked: Asked) -> Answered:
    if asked.body is None:
        response = client.get(url + asked.path)
    else:
        response = client.post(url + asked.path, json=asked.body)
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return Answered(response.status_code, events=list(_events_of(response.text)))
    if kind.startswith("application/x-ndjson"):
        lines = [json.loads(line) for line in response.text.splitlines()]
        return Answered(response.status_code, events=lines)
    try:
        return Answered(response.status_code, response.json())
    except ValueError:
        return Answered(response.status_code, response.text)


def _events_of(text: str) -> Iterator[Any]:
    """Yield the data of each event, without keep-alive comments."""
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ").strip()
            yield data if data == "[DONE]" else json.loads(data)


GROWING = {
    "content", "text", "delta", "arguments", "thinking", "partial_json", "reasoning_content",
    "tokens", "completion_probabilities", "name",
}  # fmt: skip
"""Fields whose values in a stream's events are concatenated; of all others the last one counts."""


def summed(events: Iterable[Any]) -> dict[str, Any]:
    """Sum the events of each kind, because each server cuts a stream into its own pieces."""
    sums: dict[str, Any] = {}
    for event in events:
        if not isinstance(event, dict):
            sums[str(event)] = True
            continue
        place = event.get("index", event.get("output_index", 0))
        kind = f"{event.get('type', event.get('object', 'event'))}{place or ''}"
        sums[kind] = _added(sums.get(kind), event, "")
    return sums


def _added(sum: Any, given: Any, name: str) -> Any:
    if isinstance(sum, dict) and isinstance(given, dict):
        return sum | {key: _added(sum.get(key), value, key) for key, value in given.items()}
    if name in GROWING and isinstance(sum, str) and isinstance(given, str):
        return sum + given
    if isinstance(sum, list) and isinstance(given, list):
        if all(isinstance(item, dict) and "index" in item for item in (*sum, *given)):
            by_index = {item["index"]: item for item in sum}
            for item in given:
                by_index[item["index"]] = _added(by_index.get(item["index"]), item, "")
            return [by_index[index] for index in sorted(by_index)]
        if name in GROWING:
            return sum + given
    return sum if given is None else given
