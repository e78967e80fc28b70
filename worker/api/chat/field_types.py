"""Types of fields that several bodies share: unions by JSON type, limits, checks. Pure data, any
thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from worker.api.chat.sampling import TokenId
from worker.api.http.body import Flag, Integer, Item, JsonObject, Many
from worker.api.http.faults import wrong

MAX_CHOICES = 32
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 128
ModelName = Annotated[str, Field(max_length=1024)]
ToolName = Annotated[str, Field(max_length=256)]
TopLogprobs = Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Limit = Annotated[Integer, Field(ge=-1, le=2**31 - 1)]
"""-1 means no limit."""


def json_kind(value: object) -> str:
    """The tag of a union's branch for the JSON type of `value`."""
    match value:
        case str():
            return "~text"
        case list() | tuple():
            return "~list"
        case bool():
            return "~flag"
        case int() | float():
            return "~number"
    return "~null" if value is None else "~object"


ByKind = Discriminator(json_kind)
Text = Annotated[str, Tag("~text")]
TextOr = Annotated[Text | Annotated[Item, Tag("~object")], ByKind]
TextOrNumber = Annotated[Text | Annotated[Item, Tag("~number")], ByKind]
TextOrList = Annotated[Text | Annotated[Item, Tag("~list")], ByKind]
TextOrMany = TextOrList[Many[Item]]
FlagOrWord = Annotated[Annotated[Flag, Tag("~flag")] | Annotated[Item, Tag("~text")], ByKind]
TokenIds = Annotated[Many[TokenId], Field(min_length=1)]


def _stops(value: object) -> object:
    """One text or several, without empty ones, which some clients send."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise wrong("type", "must be a text or a list of texts")
    return [each for each in texts if each != ""]


Stops = Annotated[
    Many[str],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stops, json_schema_input_type=str | tuple[str, ...]),
]
"""The texts that end an answer."""


def needed_by(fields: Mapping[str, str]) -> Any:
    """A pydantic validator: the field that `fields` has for the body's `type` must not be empty."""

    def check(body: Any) -> Any:
        field = fields.get(body.type)
        if field is not None and getattr(body, field) in (None, ""):
            name = field.rstrip("_")
            raise wrong("required", f"of type {body.type} needs {name}")
        return body

    return model_validator(mode="after")(check)


def ignoring(kinds: Collection[str]) -> Any:
    """A pydantic validator: of an object whose `type` is one of `kinds` only the type is read."""

    def check(cls: Any, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        return {"type": kind} if isinstance(kind, str) and kind in kinds else value

    return model_validator(mode="before")(check)


Schema = TextOr[JsonObject]
ANY_OBJECT = {"type": "object"}
