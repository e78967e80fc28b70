"""Turns the form that a request asks for into a Lark grammar, which llguidance enforces.

All limits on size are checked here and in the modules that this one calls. Whatever passes them
compiles in the engine in less than 100 ms. Pure functions, any thread.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from worker.api.chat.constrain import sizes
from worker.api.chat.constrain.gbnf import to_lark
from worker.api.chat.constrain.lark import pattern_of
from worker.api.chat.constrain.patterns import MAX_CHARS as MAX_PATTERN_CHARS
from worker.api.chat.constrain.schema import Schemas
from worker.api.chat.request import (
    INPUT,
    Choices,
    Expression,
    ForcedCalls,
    Format,
    Grammar,
    JsonSchema,
    Tool,
)
from worker.api.http.faults import fault, invalid, refusal
from worker.errors import InvalidRequest
from worker.wire.sampling import Constraint

MAX_CHOICES = 1000
MAX_CHOICES_CHARS = 16_000
MAX_GBNF_CHARS = 32_000
MAX_LARK_CHARS = 16_000
MAX_LARK_LINES = 400
MAX_FORCED_CALLS = 16
"""The most calls in one answer: a small model without a limit may never stop calling."""

_JSON_LAYOUT = {"whitespace_pattern": r"[ \t]{1,8}|\r?\n[ \t]{0,64}"}
"""White space in JSON: a few blanks on a line, or one line end and an indentation. A model that may
write any number of blanks may never stop writing them."""

_CALL = ("name", "arguments")


class Constrained(NamedTuple):
    constraint: Constraint
    not_enforced: tuple[str, ...]
    """Paths of the schema's keywords that the answer may violate."""
    resembles_calls: bool = False
    """Whether an answer under the schema may begin like a call and go on with other members."""


def constrain(asked: Format | ForcedCalls, *, strict: bool = False) -> Constrained:
    """The constraint for a form.

    Raises:
        InvalidRequest: the form is invalid or too large, or a part of it cannot be enforced and
            `strict` or `asked.strict` is true.
    """
    path, schemas = "tools" if isinstance(asked, ForcedCalls) else asked.path, Schemas()
    resembles_calls = False
    refused: tuple[str, ...] = ()
    match asked:
        case JsonSchema(schema, calls=tools):
            root = schemas.compiled(schema, path)
            resembles_calls = _resembles_a_call(schemas.target_of(root))
            refused = tuple(schemas.not_enforced) if asked.strict else ()
            if tools and root is not False:
                root = {"anyOf": [root, *_free_calls(schemas, tools)]}
            grammar = _of_json(schemas, root, path)
        case ForcedCalls(tools, several):
            grammar = _of_json(schemas, _forced_calls(schemas, tools, several), path)
        case Expression(pattern):
            grammar = _of_expression(pattern, path)
        case Choices(texts):
            grammar = _of_choices(texts, path)
        case Grammar(text):
            grammar = _of_grammar(text, path)
    not_enforced = tuple(schemas.not_enforced)
    if refused := not_enforced if strict else refused:
        remedy = "leave it out" if strict else "leave it out, or ask without strict"
        raise invalid(
            fault(each, "unsupported", f"{each} cannot be enforced; {remedy}") for each in refused
        )
    return Constrained(Constraint(grammar, path), not_enforced, resembles_calls)


def _resembles_a_call(root: Any) -> bool:
    """Whether a compiled schema may allow `{"name": …, "arguments": {…}, …}`."""
    if not isinstance(root, dict) or "object" not in root.get("type", "object"):
        return root is True
    names = root.get("properties", {}).keys()
    is_open = root.get("additionalProperties") is not False or "patternProperties" in root
    return is_open or ("arguments" in names and len(names) > len(_CALL))


def _forced_calls(schemas: Schemas, tools: tuple[Tool, ...], several: bool) -> dict[str, Any]:
    one: dict[str, Any] = {"anyOf": [_held_call(schemas, tool) for tool in tools]}
    many = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_FORCED_CALLS}
    return many if several else one


def _free_calls(schemas: Schemas, tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Calls beside a schema. Only the text of a custom tool has a form that must hold."""
    names = list(dict.fromkeys(tool.name for tool in tools if tool.form is None))
    free = [_call({"enum": names}, {"type": "object"})] if names else []
    return free + [_held_call(schemas, tool) for tool in tools if tool.form is not None]


def _held_call(schemas: Schemas, tool: Tool) -> dict[str, Any]:
    parameters = {"type": "object", **(tool.parameters or {})}
    if parameters["type"] != "object":
        schemas.fault(f"{tool.path}.type", "const", "must be 'object'")
    arguments = schemas.compiled(parameters, tool.path)
    if (form := tool.form) is not None and isinstance(arguments, dict):
        pattern = pattern_of(form)
        if pattern and (pattern := schemas.pattern(f"^(?:{pattern})$", None)):
            arguments["properties"][INPUT]["pattern"] = pattern
        else:
            schemas.leave_out(form.path)
    return _call({"const": tool.name}, arguments)


def _call(name: dict[str, Any], arguments: Any) -> dict[str, Any]:
    call = dict(zip(_CALL, (name, arguments), strict=True))
    shape = {"properties": call, "required": list(call), "additionalProperties": False}
    return {"type": "object", **shape}


def _of_json(schemas: Schemas, root: Any, path: str) -> str:
    schemas.check()
    if root is False:
        raise refusal(path, "unsupported", "allows no answer")
    schema = {"x-guidance": _JSON_LAYOUT, **(root if isinstance(root, dict) else {})}
    if schemas.definitions:
        schema["$defs"] = schemas.definitions
    return f"start: %json {json.dumps(schema)}"


def _of_expression(pattern: str, path: str) -> str:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise refusal(path, "unsupported", f"has more than {MAX_PATTERN_CHARS} characters")
    if not pattern:
        raise refusal(path, "unsupported", "is empty")
    if sizes.size(pattern) > sizes.MAX_SIZE:
        raise _repeats_too_often(path)
    escaped = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return f"start: /{escaped}/"


def _of_choices(texts: tuple[str, ...], path: str) -> str:
    if not texts or len(texts) > MAX_CHOICES or sum(map(len, texts)) > MAX_CHOICES_CHARS:
        limits = f"1 to {MAX_CHOICES} texts of {MAX_CHOICES_CHARS} characters in all"
        raise refusal(path, "unsupported", f"must be {limits}")
    return "start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in dict.fromkeys(texts))


def _of_grammar(text: str, path: str) -> str:
    if len(text) > MAX_GBNF_CHARS:
        raise refusal(path, "unsupported", f"has more than {MAX_GBNF_CHARS} characters")
    if not re.search(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", text, re.MULTILINE):
        return to_lark(text, path)
    if len(text) > MAX_LARK_CHARS or text.count("\n") > MAX_LARK_LINES:
        limits = f"{MAX_LARK_CHARS} characters in {MAX_LARK_LINES} lines"
        raise refusal(path, "unsupported", f"has more than {limits}")
    if "%json" in text or "%regex" in text:
        raise refusal(path, "unsupported", "must not use %json or %regex; send a schema instead")
    if not sizes.LarkSizes(text).are_small():
        raise _repeats_too_often(path)
    return text


def _repeats_too_often(path: str) -> InvalidRequest:
    limit = f"more than {sizes.MAX_SIZE} characters once its repetitions are written out"
    return refusal(path, "unsupported", f"repeats too often: it has {limit}")
