"""llama-server's bodies and answers that OpenAI's API does not have. Pure data, any thread."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field
from typing_extensions import TypedDict

from worker.api.body import Flag, OpenBody
from worker.api.openai.schema import TokenId


class TokenizeBody(OpenBody):
    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: Flag = Field(False, description="add BOS as the model wants it")
    with_pieces: Flag = Field(False, description="answer each token's text beside its id")


class DetokenizeBody(OpenBody):
    tokens: tuple[TokenId, ...] = Field(fail_fast=True)


class Tokens(TypedDict):
    tokens: list[int] | list[dict[str, Any]]


class TextContent(TypedDict):
    content: str


class Prompt(TypedDict):
    prompt: str


class Props(TypedDict):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class Slot(TypedDict):
    id: int
    n_ctx: int | None
    is_processing: bool
