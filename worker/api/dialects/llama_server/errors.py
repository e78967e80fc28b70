"""llama-server's form of a failure on its own paths: OpenAI's, with a type of its own for a prompt
that is too long."""

from __future__ import annotations

from typing import Any

from worker.api.http.errors import NESTED, nested_error
from worker.api.http.operation import ErrorForm
from worker.errors import ContextLengthExceeded, WorkerError


def _error(error: WorkerError, correlation_id: str) -> dict[str, Any]:
    told = nested_error(error, correlation_id)
    if isinstance(error, ContextLengthExceeded):
        told["error"] |= {
            "type": "exceed_context_size_error",
            "n_prompt_tokens": error.details["prompt_tokens"],
            "n_ctx": error.details["context_length"],
        }
    return told


ERRORS = ErrorForm(_error, NESTED.schema)
