"""The constraints that a request can set on its answer, as Lark grammars for llguidance.

JSON schemas, forced calls, regular expressions, choices and raw grammars all become Lark. All
limits on size are checked here and in the modules that this one calls. Whatever passes them
compiles in the engine in less than 100 ms. Pure functions, any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker.api.chat.constrain.gbnf import GbnfError, to_lark
from worker.api.chat.constrain.schema import Compiled, compile_schema, compile_schemas
from worker.api.http.faults import MAX_FAULTS, Fault, fault
from worker.wire.work import Constraint

MAX_PATTERN_CHARS = 4000
MAX_CHOICES = 1000
MAX_GRAMMAR_BYTES = 16_000
MAX_GRAMMAR_LINES = 400
MAX_FORCED_CALLS = 16
"""The most calls in one answer: a small model without a limit may never stop calling."""

_JSON_LAYOUT = {"whitespace_pattern": r"[ \t]{1,8}|\r?\n[ \t]{0,64}"}
"""White space in JSON: a few blanks on a line, or one line end and an indentation. A model that may
write any number of blanks may never stop writing them."""


@dataclass(frozen=True, slots=True)
class RequestedConstraint:
    """What a request asks for; `constraint` is `None` if there are `faults`."""

    constraint: Constraint | None = None
    not_enforced: tuple[str, ...] = ()
    """Paths of keywords that the answer may violate."""
    faults: tuple[Fault, ...] = ()

    def strictly(self) -> RequestedConstraint:
        """The same request, refused if a keyword cannot be enforced."""
        if self.faults or not self.not_enforced:
            return self
        faults = (
            fault(path, "unsupported", f"{path} cannot be enforced; leave it out or strict")
            for path in self.not_enforced[:MAX_FAULTS]
        )
        return RequestedConstraint(faults=tuple(faults))


@dataclass(frozen=True, slots=True)
class ForcedFunction:
    """A function that the answer may have to call; `path` is the place of its parameters."""

    name: str
    parameters: object
    path: str


def json_schema(schema: object, path: str) -> RequestedConstraint:
    """JSON that is valid under a schema."""
    return _of_schema(compile_schema(schema, path), path)


def forced_calls(functions: Sequence[ForcedFunction], *, several: bool) -> RequestedConstraint:
    """One call, `{"name", "arguments"}`, of one of `functions`, or a list of one or more."""
    documents = [(f.path, _parameters(f.parameters)) for f in functions]
    arguments, compiled = compile_schemas(documents)
    for function in functions:
        schema = function.parameters
        if isinstance(schema, dict) and schema.get("type", "object") != "object":
            message = f"{function.path}.type must be 'object'"
            compiled.faults.append(fault(f"{function.path}.type", "const", message))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function, schema in zip(functions, arguments, strict=True)
    ]
    one: dict[str, Any] = {"anyOf": calls}
    many = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_FORCED_CALLS}
    compiled.schema = {**(many if several else one), **compiled.schema}
    return _of_schema(compiled, "tools")


def regular_expression(pattern: str, path: str) -> RequestedConstraint:
    """A text that the regular expression matches as a whole."""
    if len(pattern) > MAX_PATTERN_CHARS:
        return _refused(path, f"{path} has more than {MAX_PATTERN_CHARS} characters")
    if not pattern:
        return _refused(path, f"{path} is empty")
    escaped = re.sub(r"\\.|/", lambda m: r"\/" if m[0] == "/" else m[0], pattern, flags=re.DOTALL)
    return RequestedConstraint(Constraint(f"start: /{escaped}/", path))


def choice(texts: Sequence[str], path: str) -> RequestedConstraint:
    """One of the given texts."""
    if not texts or len(texts) > MAX_CHOICES or sum(map(len, texts)) > MAX_GRAMMAR_BYTES:
        limits = f"1 to {MAX_CHOICES} texts of {MAX_GRAMMAR_BYTES} characters in all"
        return _refused(path, f"{path} must be {limits}")
    branches = " | ".join(json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return RequestedConstraint(Constraint(f"start: {branches}", path))


def grammar(text: str, path: str) -> RequestedConstraint:
    """A raw grammar: GBNF as llama.cpp reads it, or Lark as llguidance does."""
    if re.search(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", text, re.MULTILINE):
        if len(text) > MAX_GRAMMAR_BYTES or text.count("\n") > MAX_GRAMMAR_LINES:
            limits = f"{MAX_GRAMMAR_BYTES} characters in {MAX_GRAMMAR_LINES} lines"
            return _refused(path, f"{path} has more than {limits}")
        if "%json" in text or "%regex" in text:
            return _refused(path, f"{path} must not hold %json or %regex; send a schema instead")
        return RequestedConstraint(Constraint(text, path))
    try:
        return RequestedConstraint(Constraint(to_lark(text), path))
    except GbnfError as error:
        return _refused(path, f"{path} is not a valid grammar: {error}")


def _of_schema(compiled: Compiled, path: str) -> RequestedConstraint:
    if compiled.faults:
        return RequestedConstraint(faults=tuple(compiled.faults))
    schema: Any = {} if compiled.schema is True else compiled.schema
    if schema is False:
        return _refused(path, f"{path} allows no answer")
    text = json.dumps({"x-guidance": _JSON_LAYOUT, **schema})
    return RequestedConstraint(
        Constraint(f"start: %json {text}", path), tuple(compiled.not_enforced)
    )


def _parameters(schema: object) -> object:
    """The schema of a function's arguments; without one, any object is allowed."""
    schema = {} if schema is None else schema
    return {"type": "object", **schema} if isinstance(schema, dict) else schema


def _refused(path: str, message: str) -> RequestedConstraint:
    return RequestedConstraint(faults=(fault(path, "unsupported", message),))
