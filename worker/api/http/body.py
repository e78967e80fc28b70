"""Parses a request's bytes into a frozen pydantic model; no dict is passed on.

`Body` is the base of the worker's own schemas, where an unknown field is an error. `OpenBody` is
the base of all others, where null counts as absent, and unknown fields are ignored but listed in
the answer's headers. Sizes are checked before any object is built. Runs on the API process's event
loop and, for large bodies, on a thread.
"""

from __future__ import annotations

import json
import re
import string
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema
from starlette.requests import Request

from worker.api.http.faults import faults_of, invalid, refusal, unknown_fields, wrong
from worker.api.http.headers import CONTENT_ENCODING, CONTENT_LENGTH, DEADLINE
from worker.api.http.off_loop import in_background
from worker.api.http.state import AppState
from worker.errors import InferenceTimeout, PayloadTooLarge, QueueFull

MAX_NESTING = 64
MAX_SIGNS = {
    "values": (2**18, b","),
    "names": (2**16, b":"),
    "objects": (2**14, b"{"),
    "lists": (2**15, b"["),
}
"""Of each kind, the most in one body, and the character that counts it."""
MAX_ESCAPES = 2**20
"""The most in a body's strings. Within these limits, one call of the parser on 4 MiB takes some
10 ms, during which no other thread runs."""
_ALWAYS_FEW = min(limit for limit, _ in MAX_SIGNS.values())
"""A text of at most this many bytes cannot exceed a limit of `MAX_SIGNS`."""
SMALL_BYTES = 8 * 1024
"""A larger body is parsed off the event loop. A smaller one takes less than 20 ms, whatever it
holds, and is accepted however many others are being sent."""
MAX_FIELDS = 256
"""The most fields in one object of a schema."""
BODY_SETTING = "--max-body-bytes"
"""The setting that limits a body's size."""
MAX_BODY_BYTES_AT_ONCE = 32 * 2**20
"""The most bytes in all bodies that are being read."""
_LEAVES = frozenset({str, int, float, bool, dict, type(None)})
"""Types of values that contain no body; `isinstance` on a model's class is several times slower."""
_SLICE_BYTES = 64 * 1024
"""The most bytes that one call scans, because no other thread runs during it."""
MAX_DIGITS = 64
"""The most before a number's decimal point: to print an integer, Python needs time that grows with
the square of its digits."""
_TOO_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
_AS_ZEROS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))
"""A translation table: each digit to 0, all else to a space."""
_OF_BASE64 = (string.ascii_letters + string.digits + "+/=").encode()
_WIDE_NUMBER = re.compile(rb"(?<![0-9.eE+])(?<![eE]-)[0-9]{%d}" % len(_TOO_MANY_DIGITS))
_NO_CODING = "identity"
_OF_A_FIELD = ("title", "description", "default")
"""Keywords of a field's schema that are not about its type."""
BOM = b"\xef\xbb\xbf"


# --- types -------------------------------------------------------------------------------


Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
JsonObject = dict[str, Any]
Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], Field(fail_fast=True)]
"""A list whose validation stops at its first fault, so that a hostile one has few errors."""


class Refused:
    """In the type of a field that other servers have: it would change what an answer means, and
    cannot be honoured. So it is refused unless its value is empty or `off`, which asks for nothing.

    Fields that change no meaning need no declaration: unknown ones are ignored by name.
    """

    def __init__(self, instead: str, off: object = None) -> None:
        """`instead` says what to do instead, for the error."""
        turned_off = "" if off is None else f", or turn it off with {json.dumps(off)}"
        self._off, self._advice = off, instead + turned_off

    def _check(self, value: Any) -> Any:
        if value and value != self._off:
            raise wrong("unsupported", f"is not supported; {self._advice}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(core), "description": f"not supported; {self._advice}"}


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, defer_build=True)
    _null_is_absent: ClassVar[bool]

    @model_validator(mode="before")
    @classmethod
    def _prepared(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise wrong("maxProperties", f"must have at most {MAX_FIELDS} fields")
        # JSON has only one number type, so 1.0 counts as an integer.
        return {
            name: int(each) if type(each) is float and each.is_integer() else each
            for name, each in value.items()
            if each is not None or not cls._null_is_absent
        }


class Body(_Object):
    """A closed object: an unknown field is refused by name."""

    model_config = ConfigDict(extra="forbid")
    _null_is_absent = False


class OpenBody(_Object):
    """An open object: null counts as absent, and unknown fields stay in `model_extra`."""

    model_config = ConfigDict(extra="allow")
    _null_is_absent = True
    list_field: ClassVar[str | None] = None
    """The field that a bare list stands for; `None`: the body must be an object."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema, in which each alias is a property and each optional field permits null."""
        schema = handler(core)
        plain = handler.resolve_ref_schema(schema)
        properties, required = plain.get("properties", {}), plain.get("required", ())
        for name, part in properties.items():
            if name not in required and {"type": "null"} not in part.get("anyOf", ()):
                own = {key: part.pop(key) for key in _OF_A_FIELD if key in part}
                properties[name] = {**own, "anyOf": [part, {"type": "null"}]}
        for field in cls.model_fields.values():
            if isinstance(field.validation_alias, AliasChoices):
                first, *others = map(str, field.validation_alias.choices)
                properties |= {name: properties[first] for name in others if first in properties}
        return schema


AnyBody = TypeVar("AnyBody", bound=BaseModel)
Converted = TypeVar("Converted")


# --- reading -----------------------------------------------------------------------------


async def read(request: Request, state: AppState, model: type[AnyBody]) -> AnyBody:
    """Read the request's body as `model`.

    Raises:
        InvalidRequest: the body is invalid; the error lists every fault, or the first 32.
        PayloadTooLarge: the body has more bytes than this worker accepts.
    """
    return await read_as(request, state, model, lambda body: body)


async def read_as(
    request: Request, state: AppState, model: type[AnyBody], convert: Callable[[AnyBody], Converted]
) -> Converted:
    """The result of `convert` on the body. Both run off the event loop if the body is large.

    Raises what `read` and `convert` raise.
    """
    served = state.served
    async with received(request, served.max_body_bytes) as body:
        work = partial(_read, body, served.max_text_bytes, model, convert)
        found, ignored = work() if len(body) <= SMALL_BYTES else await in_background(work)
    if ignored:
        if state.settings.strict:
            raise unknown_fields(ignored, model)
        name_ignored(request, ignored)
    return found


def name_ignored(request: Request, fields: Iterable[str]) -> None:
    """List `fields` of the body in the answer's headers as ignored."""
    request.scope["state"].setdefault("ignored_fields", []).extend(fields)


def _read(
    sent: bytearray,
    max_text_bytes: int,
    model: type[AnyBody],
    convert: Callable[[AnyBody], Converted],
) -> tuple[Converted, list[str]]:
    """The result of `convert` on the body, and the names of ignored fields."""
    text = bytes(sent).removeprefix(BOM)
    if len(text) > max_text_bytes:
        n_bytes = sum(map(_n_text_bytes, _slices(text)))
        if n_bytes > max_text_bytes:
            raise _too_large(f"{n_bytes} bytes besides base64", max_text_bytes)
    if not text or text.isspace():
        raise refusal("", "type", "is empty; it must be a JSON object")
    value = parse_json(text)
    if isinstance(value, list) and issubclass(model, OpenBody) and model.list_field is not None:
        value = {model.list_field: value}
    if not isinstance(value, dict):
        raise refusal("", "type", "must be a JSON object", value)
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise invalid(faults_of(error, model)) from None
    ignored = dict.fromkeys(_extras(body, "")) if isinstance(body, OpenBody) else ()
    return convert(body), list(ignored)


def parse_json(text: bytes, path: str = "") -> Any:
    """Parse JSON within limits that keep other threads from waiting for more than milliseconds.

    Raises:
        InvalidRequest: the text is not JSON, or has too many values, levels or digits. The fault is
            at `path`, which is empty for the whole body.
    """
    if len(text) > _ALWAYS_FEW and (kind := _excess(text)) is not None:
        what = f"has more than {MAX_SIGNS[kind][0]} {kind}; send them in several requests"
        raise refusal(path, "maxItems", what)
    if len(text) > MAX_ESCAPES and _has_more(text, b"\\", MAX_ESCAPES):
        raise refusal(path, "maxItems", f"has more than {MAX_ESCAPES} escapes (\\) in its strings")
    if _TOO_MANY_DIGITS in text.translate(_AS_ZEROS) and _has_wide_number(text):
        raise refusal(path, "maxDigits", f"holds a number of more than {MAX_DIGITS} digits")
    try:
        # A string cache would double the time if all strings differ.
        value = pydantic_core.from_json(text, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        # The parser's message says what it expected and where, without quoting the body.
        raise refusal(path, "json", f"is not valid JSON: {error}") from None
    if text.count(b"{") + text.count(b"[") > MAX_NESTING and is_deep(value):
        raise refusal(path, "nesting", f"is nested deeper than {MAX_NESTING} levels")
    return value


def _excess(text: bytes) -> str | None:
    """The kind of which a JSON text has too many, by the signs outside its strings; else `None`."""
    if not any(_has_more(text, sign, limit) for limit, sign in MAX_SIGNS.values()):
        return None
    outside = _outside_of_strings(text)
    signs = MAX_SIGNS.items()
    return next((kind for kind, (limit, sign) in signs if _has_more(outside, sign, limit)), None)


def _slices(text: bytes) -> Iterator[bytes]:
    for at in range(0, len(text), _SLICE_BYTES):
        yield text[at : at + _SLICE_BYTES]


def _has_more(text: bytes, sign: bytes, limit: int) -> bool:
    slices = range(0, len(text), _SLICE_BYTES)  # counts in place, without copies
    return sum(text.count(sign, at, at + _SLICE_BYTES) for at in slices) > limit


def _n_text_bytes(part: bytes) -> int:
    return len(part.translate(None, _OF_BASE64))


def _has_wide_number(text: bytes) -> bool:
    outside = _outside_of_strings(text)
    return any(
        _WIDE_NUMBER.search(outside, at, at + _SLICE_BYTES + MAX_DIGITS)
        for at in range(0, len(outside), _SLICE_BYTES)
    )


def _outside_of_strings(text: bytes) -> bytes:
    """A JSON text, which may be truncated, without the contents of its strings."""
    outside: list[bytes] = []
    begun = b""
    for piece in _slices(text):
        part = (begun + piece).replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        outside.append(b'"'.join(pieces[::2]))
        # The next slice may begin inside a string, or in the middle of an escape.
        begun = b'"' if len(pieces) % 2 == 0 else b""
        begun += b"\\" if part.endswith(b"\\") else b""
    return b"".join(outside)


@asynccontextmanager
async def received(request: Request, limit: int) -> AsyncIterator[bytearray]:
    """The body, which counts towards the surface's `body_bytes` until the block ends."""
    surface = request.app
    if (CONTENT_ENCODING.of(request) or _NO_CODING).lower() != _NO_CODING:
        what = "must be absent: compressed bodies are not supported"
        raise refusal(CONTENT_ENCODING.name, "enum", what)
    declared = CONTENT_LENGTH.of(request) or ""
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise _too_large(f"{declared} bytes", limit, surface.body_setting)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            surface.body_bytes += len(chunk)
            if len(body) > limit:
                raise _too_large(f"more than {limit} bytes", limit, surface.body_setting)
            is_small = len(body) <= SMALL_BYTES
            if surface.body_bytes > max(MAX_BODY_BYTES_AT_ONCE, limit) and not is_small:
                message = "too many bodies are being sent at once"
                raise QueueFull(message, retry_after_seconds=1)
        yield body
    finally:
        surface.body_bytes -= len(body)


def _too_large(found: str, limit: int, setting: str = BODY_SETTING) -> PayloadTooLarge:
    message = f"the body has {found}; at most {limit} are accepted ({setting})"
    return PayloadTooLarge(message, limit_bytes=limit)


def is_deep(value: object) -> bool:
    """Whether objects and lists are nested deeper than `MAX_NESTING`."""
    depth, level = 0, [value] if isinstance(value, dict | list) else []
    while level:
        depth += 1
        if depth > MAX_NESTING:
            return True
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if type(child) is dict or type(child) is list
        ]
    return False


def _extras(body: OpenBody, path: str) -> Iterator[str]:
    """The names of unknown fields in open objects. A second alias of a field counts as unknown only
    if its value differs from the field's."""
    prefix = f"{path}." if path else ""
    extra = body.model_extra or {}
    for name in extra:
        field, value = names_of_fields(type(body)).get(name), extra[name]
        value = tuple(value) if isinstance(value, list) else value
        if field is None or getattr(body, field) != value:
            yield prefix + name
    for name, item in vars(body).items():
        if not item or type(item) in _LEAVES:
            continue
        if isinstance(item, OpenBody):
            yield from _extras(item, prefix + name)
        elif isinstance(item, tuple):
            for each in item:
                if isinstance(each, OpenBody):  # a list may also hold plain strings
                    yield from _extras(each, f"{prefix}{name}[]")


@cache
def names_of_fields(model: type[BaseModel]) -> dict[str, str]:
    """Maps each alias of a field that has several to the field's name."""
    return {
        str(name): field
        for field, info in model.model_fields.items()
        if isinstance(info.validation_alias, AliasChoices)
        for name in info.validation_alias.choices
    }


def deadline_of(request: Request) -> float | None:
    """`X-Deadline` (Unix time in milliseconds) on the monotonic clock; `None` without the header.

    Raises:
        InvalidRequest: the header is not a number of milliseconds.
        InferenceTimeout: the deadline has already passed.
    """
    raw = DEADLINE.of(request)
    if raw is None:
        return None
    if not (raw.isascii() and raw.isdigit() and len(raw) <= 15):
        what = "must be a Unix time in whole milliseconds"
        raise refusal(DEADLINE.name, "type", what)
    seconds_left = int(raw) / 1000 - time.time()
    if seconds_left <= 0:
        raise InferenceTimeout(
            "the deadline in X-Deadline, in milliseconds since 1970, passed "
            f"{-seconds_left:.3f} seconds ago, before any work"
        )
    return time.monotonic() + seconds_left
