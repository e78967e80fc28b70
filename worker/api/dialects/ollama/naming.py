"""Model names, times and errors in Ollama's form. Pure functions, any thread."""

from __future__ import annotations

import json
import time

from typing_extensions import TypedDict

from worker.api.http.encoding import json_line, rfc3339
from worker.api.http.operation import ErrorForm, StreamForm
from worker.api.http.state import AppState

_TAG = ":latest"


def tagged(name: str) -> str:
    """The name with a tag, which every model listed by Ollama has."""
    return name if ":" in name else name + _TAG


def untagged(name: str) -> str:
    return name.removesuffix(_TAG)


def served(name: str, state: AppState) -> str:
    """The worker's own name for the model that a client names with or without a tag."""
    return name if name in state.all_names else untagged(name)


def now() -> str:
    return rfc3339(time.time(), "microseconds")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class OllamaError(TypedDict):
    error: str


ERRORS = ErrorForm(lambda error, correlation_id: {"error": error.message}, OllamaError)
LINES = StreamForm(
    # Quotes in texts are escaped, but a call may have an argument of this name.
    lambda line: (
        line.startswith((b'{"error":', b'{"status":"success"'))
        or (b'"done":true' in line and json.loads(line)["done"])
    ),
    lambda error, first, last: json_line({"error": error.message}),
)
