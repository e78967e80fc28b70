"""Asks a server and reads its answer as one value, streamed or whole. Pure but for the request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to both servers."""

    path: str
    body: Any = None
    """`None` is a GET."""

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True

    def __str__(self) -> str:
        return self.path if self.body is None else f"{self.path} {json.dumps(self.body)}"


def answered(client: httpx.Client, url: str, asked: Asked) -> dict[str, Any]:
    """The status, and the answer: of a stream, the sum of its events."""
    if asked.body is None:
        response = client.get(url + asked.path)
    else:
        response = client.post(url + asked.path, json=asked.body)
    found: dict[str, Any] = {"status": response.status_code}
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return found | {"stream": summed(events_of(response.text))}
    try:
        return found | {"answer": response.json()}
    except ValueError:
        return found | {"text": response.text}


def events_of(text: str) -> Iterator[Any]:
    """The data of each event; keep-alive comments are none."""
    for line in text.splitlines():
        if data := line.removeprefix("data: ").strip() if line.startswith("data: ") else "":
            yield data if data == "[DONE]" else json.loads(data)


GROWING = {
    "content", "text", "delta", "arguments", "thinking", "partial_json", "reasoning_content",
    "tokens", "completion_probabilities", "name",
}  # fmt: skip
"""Fields whose values in the events of a stream follow each other; of the others, the last counts.
"""


def summed(events: Iterator[Any]) -> dict[str, Any]:
    """The events of each kind added up: where a stream is cut into pieces is each server's own."""
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
