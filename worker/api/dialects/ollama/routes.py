"""Ollama's paths."""

from __future__ import annotations

from worker.api.dialects.ollama.embed import OPERATIONS as EMBEDDINGS
from worker.api.dialects.ollama.errors import ERRORS, LINES
from worker.api.dialects.ollama.models import OPERATIONS as MODELS
from worker.api.http.operation import NDJSON, Dialect

DIALECT = Dialect([*MODELS, *EMBEDDINGS], ERRORS, {NDJSON: LINES}, root="/api/")
