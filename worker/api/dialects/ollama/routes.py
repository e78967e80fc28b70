"""Ollama's paths."""

from __future__ import annotations

from worker.api.chat.operations import generation
from worker.api.dialects.ollama.embed import OPERATIONS as EMBEDDINGS
from worker.api.dialects.ollama.models import OPERATIONS as MODELS
from worker.api.dialects.ollama.naming import ERRORS, untagged
from worker.api.dialects.ollama.schema import ChatBody, GenerateBody, read_chat, read_generate
from worker.api.dialects.ollama.stream import ChatAnswer, GenerateAnswer
from worker.api.http.operation import Dialect

_REFERENCE = "https://docs.ollama.com/api"
OPERATIONS = [
    generation(
        "/api/chat", "Generate the next message of a chat, in Ollama's form",
        ChatBody, read_chat, ChatAnswer,
    ),
    generation(
        "/api/generate", "Continue a text, in Ollama's form",
        GenerateBody, read_generate, GenerateAnswer,
    ),
]  # fmt: skip
DIALECT = Dialect(
    [*MODELS, *EMBEDDINGS, *OPERATIONS],
    ERRORS,
    model_name=untagged,
    reference=_REFERENCE,
    root="/api/",
)
