"""Ollama's form of a failure, the same in an answer and as the last line of a stream."""

from __future__ import annotations

from typing_extensions import TypedDict

from worker.api.http.encoding import dumps
from worker.api.http.operation import ErrorForm, StreamForm


class OllamaError(TypedDict):
    error: str


ERRORS = ErrorForm(lambda error, correlation_id: {"error": error.message}, OllamaError)
LINES = StreamForm(
    # Quotes in a text are escaped, so no answer's text looks like this.
    lambda line: b'"done":true' in line or line.startswith(b'{"error":'),
    lambda error, first, last: f"{dumps({'error': error.message})}\n".encode(),
)
