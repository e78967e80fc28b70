"""Anthropic's paths."""

from __future__ import annotations

from worker.api.chat.operations import counting, generation
from worker.api.dialects.anthropic.schema import MessagesBody, PromptBody, chat_of, read
from worker.api.dialects.anthropic.stream import ERRORS, MessageAnswer
from worker.api.http.operation import Dialect

_REFERENCE = "https://docs.claude.com/en/api/messages"
OPERATIONS = [
    generation(
        "/v1/messages", "Generate the next message of a chat, in Anthropic's form",
        MessagesBody, read, MessageAnswer,
    ),
    counting("/v1/messages/count_tokens", PromptBody, chat_of),
]  # fmt: skip
DIALECT = Dialect(
    OPERATIONS,
    ERRORS,
    reference=_REFERENCE,
    root="/v1/messages/",
)
