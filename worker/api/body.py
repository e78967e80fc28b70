"""From a request's bytes to a frozen pydantic model; nothing behind it sees a dict.

`Body` is the base of the worker's own schemas, where an unknown field is an error. `OpenBody` is
the base of all others, where null counts as absent and unknown fields are ignored by name. Sizes
are checked before anything is built from them. Runs on the API process's event loop.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, TypeVar

import pydantic_core
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema
from starlette.requests import Request

from worker.api.faults import MAX_FAULTS, fault, faults_of, invalid, unknown_fields
from worker.api.state import AppState
from worker.errors import InferenceTimeout, PayloadTooLarge, QueueFull

MAX_NESTING = 64
MAX_VALUES = 2**18
"""In one body, counted by its commas; more of them would hold up the event loop."""
MAX_FIELDS = 256
"""Of one object that is described field by field."""
MAX_BODY_BYTES_AT_ONCE = 32 * 2**20
"""Of all bodies that are being read."""
_BOM = b"\xef\xbb\xbf"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


# --- types -------------------------------------------------------------------------------


Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
JsonObject = dict[str, Any]


def _whole(value: Any) -> Any:
    """JSON knows one kind of number, so 1.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(BaseModel):
    """A closed object: an unknown field is refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _with_integers(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: _whole(item) for name, item in value.items()}


class OpenBody(BaseModel):
    """An open object: null counts as absent, and unknown fields are left in `model_extra`."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if len(value) > MAX_FIELDS:
            message = f"must have at most {MAX_FIELDS} fields"
            raise pydantic_core.PydanticCustomError("body.maxProperties", message)
        return {name: _whole(item) for name, item in value.items() if item is not None}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema with the aliases of each field, and null where a field may be absent."""
        schema = handler(core)
        plain = handler.resolve_ref_schema(schema)
        properties, required = plain.get("properties", {}), plain.get("required", ())
        for name, part in properties.items():
            if name not in required and {"type": "null"} not in part.get("anyOf", ()):
                properties[name] = {"anyOf": [part, {"type": "null"}]}
        for field in cls.model_fields.values():
            if isinstance(field.validation_alias, AliasChoices):
                first, *others = map(str, field.validation_alias.choices)
                properties |= {name: properties[first] for name in others if first in properties}
        return schema


AnyBody = TypeVar("AnyBody", bound=BaseModel)


# --- reading -----------------------------------------------------------------------------


async def read(request: Request, state: AppState, model: type[AnyBody]) -> AnyBody:
    """The request's body as `model`.

    Raises:
        InvalidRequest: with every fault, or the first 32.
        PayloadTooLarge: it has more bytes than this worker takes.
    """
    value = parse(await _read_bytes(request, state))
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise invalid(faults_of(error, model)) from None
    ignored = ignored_fields(body)
    if ignored:
        if state.settings.strict:
            raise unknown_fields(ignored, model)
        request.scope["state"]["ignored_fields"] = ignored
    return body


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object, bounded in the number of its values and in its nesting."""
    body = body.removeprefix(_BOM)
    if not body.strip():
        raise invalid([fault("", "type", "the body is empty; it must be a JSON object")])
    if body.count(b",") > MAX_VALUES and _STRING.sub(b"", body).count(b",") > MAX_VALUES:
        message = f"the body has more than {MAX_VALUES} values; send them in several requests"
        raise invalid([fault("", "maxItems", message)])
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        # The parser's message names what it expected and where, and quotes nothing.
        raise invalid([fault("", "json", f"the body is not valid JSON: {error}")]) from None
    if not isinstance(value, dict):
        raise invalid([fault("", "type", "the body must be a JSON object", value)])
    if len(value) > MAX_FIELDS:
        message = f"the body must have at most {MAX_FIELDS} fields"
        raise invalid([fault("", "maxProperties", message)])
    if body.count(b"{") + body.count(b"[") > MAX_NESTING and is_deep(value):
        message = f"the body is nested deeper than {MAX_NESTING} levels"
        raise invalid([fault("", "nesting", message)])
    return value


async def _read_bytes(request: Request, state: AppState) -> bytes:
    limit = state.settings.max_body_bytes

    def refuse(found: str) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body has {found} bytes; this worker takes at most {limit} bytes",
            limit_bytes=limit,
        )

    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise refuse(declared)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            state.body_bytes += len(chunk)
            if len(body) > limit:
                raise refuse(f"more than {limit}")
            if state.body_bytes > max(MAX_BODY_BYTES_AT_ONCE, limit):
                message = "too many bodies are being sent at once"
                raise QueueFull(message, retry_after_seconds=1)
        return bytes(body)
    finally:
        state.body_bytes -= len(body)


def is_deep(value: object) -> bool:
    """Whether objects and lists are nested deeper than the bound."""
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > MAX_NESTING:
            return True
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)  # type: ignore[attr-defined]
            if type(child) is dict or type(child) is list
        ]
    return False


def ignored_fields(body: object) -> list[str]:
    """The names of unknown fields in open objects, at most 32."""
    return list(islice(dict.fromkeys(_extras(body, "")), MAX_FAULTS))


def _extras(value: object, path: str) -> Iterator[str]:
    if isinstance(value, OpenBody):
        prefix = f"{path}." if path else ""
        for name in value.model_extra or ():
            yield prefix + name
        for name, item in value:
            if isinstance(item, OpenBody | tuple):
                yield from _extras(item, prefix + name)
    elif isinstance(value, tuple) and value and isinstance(value[0], OpenBody):
        for item in value:
            yield from _extras(item, f"{path}[]")


def deadline_of(request: Request) -> float | None:
    """`X-Deadline` (Unix ms) on the monotonic clock; one that is past ends the request here."""
    raw = request.headers.get("x-deadline")
    if raw is None:
        return None
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 15):
        message = "X-Deadline must be a point in time in whole milliseconds since 1970 (Unix time)"
        raise invalid([fault("X-Deadline", "type", message)])
    seconds_left = int(raw) / 1000 - time.time()
    if seconds_left <= 0:
        raise InferenceTimeout(
            f"the deadline in X-Deadline passed {-seconds_left:.3f} seconds before any work"
        )
    return time.monotonic() + seconds_left
