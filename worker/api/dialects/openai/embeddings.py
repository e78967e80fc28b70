"""OpenAI's embeddings, and llama-server's form of them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.fields import AdaptedBody
from worker.api.chat.prompt_fields import prompts_of, prompts_of_at_most
from worker.api.http.body import Flag, Integer, name_ignored, read_as
from worker.api.http.encoding import in_parts, json_answer
from worker.api.http.faults import fault, invalid, wrong
from worker.api.http.operation import Operation
from worker.api.http.state import AppState
from worker.api.pooling.run import Embedding, embed
from worker.wire.work import Embed, MarkedPrompt, MixedTokens

MAX_INPUTS = 2048
SHORT_PATH, OWN_PATH = "/embeddings", "/embedding"
"""On `OWN_PATH`, llama-server always answers in its own form."""
Prompts: Any = prompts_of_at_most(MAX_INPUTS)


class EmbeddingBody(AdaptedBody):
    """Texts to embed. With `content` instead of `input`, the answer has llama-server's form."""

    input: Prompts | None = Field(None, description="texts or token ids to embed")
    content: Prompts | None = Field(None, description="the same, for llama-server's form")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = Field(None, ge=1, description="keep only the first dimensions")
    embd_normalize: Integer = Field(
        2,
        ge=-1,
        le=16,
        description="the p of the p-norm that vectors are divided by; -1: unscaled, 0: scaled to a "
        "largest value of 32760",
    )
    use_activation: Flag = Field(True, description="false: the same as an embd_normalize of -1")
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "little"
    user: str | None = Field(None, description="no effect")

    @model_validator(mode="after")
    def _has_texts(self) -> Self:
        if self.input is None and self.content is None:
            raise wrong("required", "needs input")
        return self

    @property
    def norm(self) -> int:
        return self.embd_normalize if self.use_activation else -1

    @property
    def field(self) -> str:
        return "content" if self.input is None else "input"

    def unused(self, *, is_own: bool, is_scaled: bool) -> Iterator[str]:
        """The fields without effect on an answer in llama-server's form (`is_own`) or in OpenAI's,
        whose vectors are scaled or not."""
        if None not in (self.input, self.content):
            yield "content"
        if is_own and self.encoding_format != "float":
            yield "encoding_format"
        if not is_scaled and "embd_normalize" in self.model_fields_set:
            yield "embd_normalize"

    def inputs(self) -> tuple[str | MixedTokens, ...]:
        """
        Raises:
            InvalidRequest: an input has pictures or sounds, which cannot be embedded.
        """
        path = self.field
        found = prompts_of(getattr(self, path), path)
        texts = tuple(each for each in found if not isinstance(each, MarkedPrompt))
        if len(texts) < len(found):
            message = f"{path}: only texts and tokens can be embedded, without multimodal_data"
            raise invalid([fault(path, "unsupported", message)])
        return texts


async def embeddings(request: Request, state: AppState) -> Response:
    body, inputs = await read_as(request, state, EmbeddingBody, lambda body: (body, body.inputs()))
    adapters = state.adapters.of(body.model, body.lora)
    path, pooling = request.url.path, state.loaded().model.pooling
    is_own = body.field == "content" or path == OWN_PATH
    is_own |= path == SHORT_PATH and pooling == "none"  # OpenAI's form has one vector per text
    work = Embed(inputs, body.norm, adapters=adapters, field=body.field)
    name_ignored(request, body.unused(is_own=is_own, is_scaled=pooling != "none"))
    found = await embed(request, state, work, body.dimensions, of_tokens=is_own)
    entries = _entries(found, body, is_own=is_own)
    n_values = sum(each.n_values for each in found)
    if is_own:
        return await json_answer(in_parts(entries), n_values)
    n_tokens = sum(each.n_tokens for each in found)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    whole = {"object": "list", "data": entries, "model": state.name_of(body.model), "usage": usage}
    return await json_answer(in_parts(whole), n_values)


def _entries(
    found: Sequence[Embedding], body: EmbeddingBody, *, is_own: bool
) -> Iterator[dict[str, Any]]:
    """One entry for each text. In llama-server's form it has a list of vectors, of which there is
    one if the model pools."""
    for index, each in enumerate(found):
        if is_own:
            yield {"index": index, "embedding": each.vectors(body.dimensions)}
            continue
        vector: Any = each.values(body.dimensions)
        if body.encoding_format == "base64":
            vector = base64.b64encode(vector.tobytes()).decode()
        yield {"object": "embedding", "index": index, "embedding": vector}


OPERATIONS = [
    Operation("POST", path, embeddings, "Embed texts", body=EmbeddingBody)
    for path in ("/v1/embeddings", SHORT_PATH, OWN_PATH)
]
