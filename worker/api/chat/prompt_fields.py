"""Fields for raw prompts, which no template renders: texts, token ids, and texts with media. Pure
functions, any thread."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from worker.api.chat.field_types import Text, TextOrList, TextOrNumber, TokenIds, json_kind
from worker.api.chat.media import MAX_MEDIA, medium_of
from worker.api.chat.sampling import TokenId
from worker.api.http.body import Many, OpenBody
from worker.wire.work import MarkedPrompt, MixedTokens

MAX_PROMPTS = 256
_MixedTokens = Many[TextOrNumber[TokenId]]
Mixed = TextOrList[_MixedTokens]
"""A text, or token ids with texts among them."""


class MarkedText(OpenBody):
    """A text, with a `<__media__>` in the place of each medium."""

    prompt_string: str
    multimodal_data: Many[str] = Field(
        (), max_length=MAX_MEDIA, description="pictures and sounds in base64"
    )


_BOTH: dict[str, Any] = {"allOf": [{"contains": {"type": each}} for each in ("string", "integer")]}
"""So that a list of texts only, or of ids only, matches no second branch of the JSON schema."""


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list | tuple):
        return json_kind(value)
    return "~mixed" if any(isinstance(part, str) for part in value) else "~ids"


def _kind_of_prompts(value: object) -> str:
    if isinstance(value, list | tuple) and not any(type(part) is int for part in value):
        return "~many"
    return _kind_of_prompt(value)


def prompts_of_at_most(most: int) -> Any:
    """The type of a field with one prompt or a list of them, each a text, a text with media, or
    token ids with texts among them. A list with a number in it is one prompt."""
    one = (
        Text
        | Annotated[TokenIds, Tag("~ids")]
        | Annotated[_MixedTokens, Field(json_schema_extra=_BOTH), Tag("~mixed")]
        | Annotated[MarkedText, Tag("~object")]
    )
    each = Annotated[one, Discriminator(_kind_of_prompt)]
    many = Annotated[Many[each], Field(min_length=1, max_length=most), Tag("~many")]
    return Annotated[one | many, Discriminator(_kind_of_prompts)]


def prompts_of(value: Any, path: str = "prompt") -> tuple[str | MixedTokens | MarkedPrompt, ...]:
    """The prompts in a field of that type, whose path is `path`.

    Raises:
        InvalidRequest: a medium is not base64, or empty.
    """
    if not isinstance(value, tuple) or any(isinstance(part, int) for part in value):
        return (_prompt_of(value, path),)
    return tuple(_prompt_of(each, f"{path}[{index}]") for index, each in enumerate(value))


def _prompt_of(
    prompt: str | MixedTokens | MarkedText, path: str
) -> str | MixedTokens | MarkedPrompt:
    if not isinstance(prompt, MarkedText):
        return prompt
    if not prompt.multimodal_data:
        return prompt.prompt_string
    media = (
        medium_of(None, encoded, f"{path}.multimodal_data[{index}]")
        for index, encoded in enumerate(prompt.multimodal_data)
    )
    return MarkedPrompt(prompt.prompt_string, tuple(media), f"{path}.prompt_string")
