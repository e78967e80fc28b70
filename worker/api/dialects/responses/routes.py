"""`/v1/responses` and its count of tokens."""

from __future__ import annotations

from worker.api.chat.operations import counting, generation
from worker.api.dialects.responses.schema import ResponsesBody, chat_of, read
from worker.api.dialects.responses.stream import ResponseAnswer
from worker.api.http.errors import NESTED
from worker.api.http.operation import Dialect

_REFERENCE = "https://platform.openai.com/docs/api-reference/responses"
OPERATIONS = [
    operation
    for path in ("/v1/responses", "/responses")
    for operation in (
        generation(
            path, "Generate a response in OpenAI's form; nothing is stored",
            ResponsesBody, read, ResponseAnswer,
        ),
        counting(
            f"{path}/input_tokens", ResponsesBody, chat_of, object="response.input_tokens"
        ),
    )
]  # fmt: skip
DIALECT = Dialect(OPERATIONS, NESTED, reference=_REFERENCE)
