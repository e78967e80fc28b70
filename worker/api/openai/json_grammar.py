"""From a JSON schema to the grammar that an answer has to follow.

A grammar can say less than a schema. What it cannot say is refused by its path and never left
out without a word; what it says, it says strictly: the output is valid JSON in every case. Where
a schema leaves room (additional properties, order), the answer takes the narrowest reading.
Pure functions, any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from worker.api.fields import Fault, fault
from worker.api.openai.number_grammar import integer_between, number_between

MAX_REPETITIONS = 1000
MAX_RULES = 4000

_NOTES = frozenset(
    "$schema $id $comment $anchor $defs definitions title description default examples "
    "deprecated readOnly writeOnly".split()
)
_RANGE = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_BY_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("format", "minLength", "maxLength")),
    "number": _RANGE,
    "integer": _RANGE,
    "boolean": frozenset(),
    "null": frozenset(),
}
_DATE = '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
_TIME = (
    '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? '
    '("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
)
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": '[0-9a-f]{8} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{12}',
}
_ANY: dict[str, str] = {
    # A run of blanks is bounded, or a model might never come to an end.
    "ws": r"[ \t\n]{0,20}",
    # No control characters and no half of a surrogate pair: what comes out is valid JSON.
    "char": r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" code)',
    "code": "[0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}",
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,17})',
    "number": 'integer ("." [0-9]{1,17})? ([eE] [+-]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "member": 'string ws ":" ws value',
    "object": '"{" ws (member ws ("," ws member ws)*)? "}"',
    "array": '"[" ws (value ws ("," ws value ws)*)? "]"',
}


def compile_schema(schema: object, path: str) -> tuple[str, list[Fault]]:
    """The grammar for `schema`, and every part of it that a grammar cannot keep."""
    compiler = _Compiler()
    return compiler.grammar(compiler.document(schema, path), path)


def compile_calls(functions: Sequence[tuple[str, str, object]]) -> tuple[str, list[Fault]]:
    """The grammar for one call, `{"name", "arguments"}`, of any of `functions`.

    A function is a path, a name and the schema of its arguments, which is a document of its own:
    what `$ref` points at lies in it, and not in what is built around it here.
    """
    compiler = _Compiler()
    calls = [compiler.call(name, schema, path) for path, name, schema in functions]
    return compiler.grammar(" | ".join(calls), "tools")


class _Compiler:
    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._faults: list[Fault] = []
        self._document: object = None
        self._path = ""
        self._targets: dict[str, str] = {}

    def grammar(self, root: str, path: str) -> tuple[str, list[Fault]]:
        if len(self._rules) > MAX_RULES:
            message = f"{path} is too large: it takes more than {MAX_RULES} grammar rules"
            self._faults.append(fault(path, "maxRules", message))
        rules = {"root": root, **_ANY, **self._rules}
        return "\n".join(f"{name} ::= {body}" for name, body in rules.items()), self._faults

    def document(self, schema: object, path: str) -> str:
        """The name of the rule for a whole document, into which its references point."""
        self._document, self._path, self._targets = schema, path, {}
        return self.visit(schema, path)

    def call(self, name: str, schema: object, path: str) -> str:
        arguments = "object"
        if isinstance(schema, Mapping) and set(schema) - _NOTES:
            if schema.get("type", "object") != "object":
                self._refuse(f"{path}.type", f"{path}.type must be 'object'")
            arguments = self.document(schema, path)
        name = _literal(json.dumps(name, ensure_ascii=False))
        return self._rule(
            rf'"{{" ws "\"name\"" ws ":" ws {name} ws ","'
            rf' ws "\"arguments\"" ws ":" ws {arguments} ws "}}"'
        )

    def visit(self, schema: object, path: str) -> str:
        """The name of the rule for a schema."""
        if schema is True:
            return "value"
        if not isinstance(schema, Mapping):
            self._refuse(path, f"{path} must be a JSON schema in the form of an object")
            return "value"
        given = set(schema) - _NOTES
        if not given:
            return "value"
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in given:
                self._only(given, {name}, f"beside {name}", path)
                return self._combined(name, schema[name], f"{path}.{name}")
        if given & {"const", "enum"}:
            return self._constants(schema, given, path)
        return self._typed(schema, given, path)

    # --- combinations --------------------------------------------------------------------

    def _combined(self, name: str, parts: object, path: str) -> str:
        if name == "$ref":
            return self._referenced(parts, path)
        if not isinstance(parts, list) or not parts:
            self._refuse(path, f"{path} must be a list of schemas")
            return "value"
        if name == "allOf" and len(parts) > 1:
            self._refuse(path, f"{path} is kept only with a single schema in it")
        branches = [self.visit(part, f"{path}[{index}]") for index, part in enumerate(parts)]
        return self._rule(" | ".join(dict.fromkeys(branches)))

    def _referenced(self, target: object, path: str) -> str:
        if not isinstance(target, str) or not target.startswith("#"):
            self._refuse(path, f"{path} must point into the schema itself, such as '#/$defs/…'")
            return "value"
        if target in self._targets:
            return self._targets[target]
        found = self._document
        for step in target[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is None:
            self._refuse(path, f"{path} points at nothing")
            return "value"
        # The name is given before the visit, because the target may refer to itself.
        name = self._targets[target] = self._rule("")
        self._rules[name] = self.visit(found, self._path + target[1:].replace("/", "."))
        return name

    def _constants(self, schema: Mapping[str, Any], given: set[str], path: str) -> str:
        self._only(given, {"const", "enum", "type"}, "beside const or enum", path)
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list) or not values:
            self._refuse(f"{path}.enum", f"{path}.enum must be a list of values")
            return "value"
        return self._rule(" | ".join(_literal(json.dumps(v, ensure_ascii=False)) for v in values))

    # --- types ---------------------------------------------------------------------------

    def _typed(self, schema: Mapping[str, Any], given: set[str], path: str) -> str:
        kinds = schema.get("type")
        if kinds is None:
            kinds = [name for name, own in _BY_TYPE.items() if own & given][:1] or ["object"]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds or not all(k in _BY_TYPE for k in kinds):
            self._refuse(f"{path}.type", f"{path}.type must be one of JSON's own types")
            return "value"
        known = frozenset[str]().union(*(_BY_TYPE[kind] for kind in kinds)) | {"type"}
        self._only(given, known, f"for type {' or '.join(kinds)}", path)
        build = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
        }
        branches = [
            build[kind](schema, path, kind) if kind in build and given & _BY_TYPE[kind] else kind
            for kind in kinds
        ]
        return branches[0] if len(branches) == 1 else self._rule(" | ".join(branches))

    def _object(self, schema: Mapping[str, Any], path: str, kind: str) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            self._refuse(path, f"{path} needs properties as an object and required as a list")
            return "object"
        more = schema.get("additionalProperties", True)
        if not properties and not required:
            return self._map(more, path)
        members = {
            name: self.visit(p, f"{path}.properties.{name}") for name, p in properties.items()
        }
        members |= {name: "value" for name in required if name not in members}
        # From the end: `rest` follows a member that was written, `first` follows the brace.
        rest = first = self._rule('""')
        for name in reversed(members):
            member = (
                f'{_literal(json.dumps(name, ensure_ascii=False))} ws ":" ws {members[name]} ws'
            )
            if name in required:
                first = self._rule(f"{member} {rest}")
                rest = self._rule(f'"," ws {member} {rest}')
            else:
                first = self._rule(f"{member} {rest} | {first}")
                rest = self._rule(f'("," ws {member})? {rest}')
        return self._rule(f'"{{" ws {first} "}}"')

    def _map(self, more: object, path: str) -> str:
        if more is False:
            return self._rule('"{" ws "}"')
        value = self.visit(more, f"{path}.additionalProperties")
        member = f'string ws ":" ws {value} ws'
        return self._rule(f'"{{" ws ({member} ("," ws {member})*)? "}}"')

    def _array(self, schema: Mapping[str, Any], path: str, kind: str) -> str:
        if "prefixItems" in schema:
            self._only(
                set(schema) & {"items", "minItems", "maxItems"}, set(), "beside prefixItems", path
            )
            parts = schema["prefixItems"]
            if not isinstance(parts, list) or not parts:
                self._refuse(f"{path}.prefixItems", f"{path}.prefixItems must be a list of schemas")
                return "array"
            items = [self.visit(p, f"{path}.prefixItems[{i}]") for i, p in enumerate(parts)]
            return self._rule('"[" ws ' + ' ws "," ws '.join(items) + ' ws "]"')
        item = self.visit(schema.get("items", True), f"{path}.items")
        low, high = self._bounds(schema, "Items", path)
        if high == 0:
            return self._rule('"[" ws "]"')
        limit = "" if high is None else str(high - 1)
        more = f'("," ws {item} ws){{{max(low - 1, 0)},{limit}}}'
        body = f"{item} ws {more}"
        return self._rule(f'"[" ws {body if low else f"({body})?"} "]"')

    def _string(self, schema: Mapping[str, Any], path: str, kind: str) -> str:
        if "format" in schema:
            self._only(set(schema) & {"minLength", "maxLength"}, set(), "beside format", path)
            pattern = _FORMATS.get(schema["format"]) if isinstance(schema["format"], str) else None
            if pattern is None:
                names = ", ".join(_FORMATS)
                self._refuse(f"{path}.format", f"{path}.format must be one of {names}")
                return "string"
            return self._rule(f'"\\"" {pattern} "\\""')
        low, high = self._bounds(schema, "Length", path)
        return self._rule(f'"\\"" char{{{low},{"" if high is None else high}}} "\\""')

    def _number(self, schema: Mapping[str, Any], path: str, kind: str) -> str:
        values = {name: schema[name] for name in sorted(_RANGE) if name in schema}
        for name, value in values.items():
            exclusive = name.startswith("exclusive") and kind == "number"
            if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 10**15:
                self._refuse(f"{path}.{name}", f"{path}.{name} is kept only as a whole number")
                return kind
            if exclusive:
                self._refuse(f"{path}.{name}", f"{path}.{name} is kept only for integers")
                return kind
        lows = [values.get("minimum"), _plus(values.get("exclusiveMinimum"), 1)]
        highs = [values.get("maximum"), _plus(values.get("exclusiveMaximum"), -1)]
        low = max((v for v in lows if v is not None), default=None)
        high = min((v for v in highs if v is not None), default=None)
        if low is not None and high is not None and low > high:
            self._refuse(path, f"{path} leaves no {kind}: its minimum is above its maximum")
            return kind
        between = integer_between if kind == "integer" else number_between
        return self._rule(between(low, high))

    # --- helpers -------------------------------------------------------------------------

    def _bounds(self, schema: Mapping[str, Any], suffix: str, path: str) -> tuple[int, int | None]:
        low, high = schema.get(f"min{suffix}", 0), schema.get(f"max{suffix}")
        for name, value in ((f"min{suffix}", low), (f"max{suffix}", high)):
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not (0 <= value <= MAX_REPETITIONS)
            ):
                limit = f"a whole number from 0 to {MAX_REPETITIONS}"
                self._refuse(f"{path}.{name}", f"{path}.{name} must be {limit}")
                return 0, None
        if high is not None and low > high:
            self._refuse(path, f"{path}: min{suffix} is above max{suffix}")
            return 0, None
        return low, high

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules[name] = body
        return name

    def _only(
        self, given: set[str], kept: set[str] | frozenset[str], where: str, path: str
    ) -> None:
        for name in sorted(given - kept):
            message = f"{path}.{name} cannot be kept {where}; leave it out or say it otherwise"
            self._refuse(f"{path}.{name}", message)

    def _refuse(self, path: str, message: str) -> None:
        self._faults.append(fault(path, "unsupported", message))


def _plus(value: int | None, step: int) -> int | None:
    return None if value is None else value + step


def _literal(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
