"""Compiles a client's JSON schema into the one that the engine enforces.

Clients send schemas as pydantic, zod, OpenAPI and the SDKs write them. Here a schema is checked
field by field, limited in size, and rewritten into what llguidance enforces: the same language or a
narrower one. A keyword that cannot be enforced is left out, and its path is reported. Pure
functions, any thread.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from worker.api.chat.constrain import keywords, patterns, proofs, sizes
from worker.api.http.faults import MAX_FAULTS, Fault, fault, invalid, is_number

Schema = Mapping[str, Any]
_Enforced = dict[str, Any] | None
# The limits keep schemas from occupying native code for long.
MAX_SIZE = 4.0 * sizes.MAX_SIZE
"""The total size of a request's regular expressions in schemas; more are not enforced."""
MAX_BYTES = 256_000
MAX_DEPTH = 48
MAX_COUNTS = {
    "parts": 2000,
    "properties": 1000,
    "required names": 1000,
    "values in enum and const": 5000,
    "targets of references": 200,
}
"""In all schemas of a request together."""
MAX_PAIRS = 4096
"""The most pairs of branches that are compared, which takes some 9 ms. Branches of further `oneOf`s
are not proven to be disjoint."""
MAX_NAMES = 500
"""The most names in one object."""
_MAX_PATH_CHARS = 400
"""A longer path is cut: a client's names may be long, with many keywords below them."""


class _TooLarge(Exception):
    """A schema exceeds a limit."""


def _below(path: str, name: str) -> str:
    return f"{path}.{name}"[:_MAX_PATH_CHARS]


class Schemas:
    """Compiles schemas that share one table of definitions.

    The `$ref`s of each schema point into itself.
    """

    def __init__(self) -> None:
        self.not_enforced: dict[str, None] = {}
        """Paths of keywords that are not enforced, in order."""
        self._faults: list[Fault] = []
        self._counts = Counter[str]()
        self.definitions: dict[str, Any] = {}
        """The targets of all references, compiled; `$ref` names them `#/$defs/…`."""
        self._referrers: dict[str, str] = {}
        """The path of the first reference to each definition."""
        self._names: dict[tuple[int, str, bool], str] = {}
        self._document: object = None
        self._path = ""
        self._n_documents = self._n_pairs = 0
        self._size_left = MAX_SIZE

    def compiled(self, schema: object, path: str) -> Any:
        """The schema to enforce for `schema`; `path` is its place in the request."""
        self._document, self._path = schema, path
        self._n_documents += 1
        try:
            if len(json.dumps(schema)) > MAX_BYTES:
                raise _TooLarge(f"it has more than {MAX_BYTES} bytes")
            return self.visit(schema, path, 0, merged=False)
        except _TooLarge as error:
            self.fault(path, "maxSize", f"is too large: {error}")
        return True

    def check(self) -> None:
        """
        Raises:
            InvalidRequest: a schema is invalid, too large, or has no finite value.
        """
        if not self._faults:
            for name in proofs.endless_in(self.definitions):
                what = "allows no finite value: each one must contain another"
                self.fault(self._referrers[name], "unsupported", what)
        if self._faults:
            raise invalid(self._faults)

    def fault(self, path: str, constraint: str, what: str) -> None:
        """In the message, `what` follows the path, as in "must be …"."""
        if len(self._faults) < MAX_FAULTS:
            self._faults.append(fault(path, constraint, f"{path} {what}"))

    def leave_out(self, path: str) -> None:
        self.not_enforced[path] = None

    def count(self, n: int, what: str) -> None:
        self._counts[what] += n
        if self._counts[what] > MAX_COUNTS[what]:
            raise _TooLarge(f"it has more than {MAX_COUNTS[what]} {what}")

    def count_names(self, n: int, what: str) -> None:
        if n > MAX_NAMES:
            raise _TooLarge(f"an object of it has more than {MAX_NAMES} {what}")
        self.count(n, what)

    def visit(self, schema: object, path: str, depth: int, *, merged: bool) -> Any:
        """The schema to enforce for `schema`. `merged`: other schemas apply at the same place, so
        this one must stay open, and sizes multiply."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self.fault(path, "type", "must be a JSON schema: an object, true or false")
            return True
        self.count(1, "parts")
        if depth > MAX_DEPTH:
            raise _TooLarge(f"it is more than {MAX_DEPTH} levels deep")
        given = {name: value for name, value in schema.items() if value is not None}
        if "const" in schema:
            given["const"] = schema["const"]
        beside = _KEYWORDS.keys() & given.keys()
        merged = merged or len(beside & _COMBINED) > (1 if beside <= _COMBINED else 0)
        parts = given.get("allOf")
        merged = merged or (isinstance(parts, list) and len(parts) > 1)
        out = _Part(self, path, depth, merged, given)
        for name, value in given.items():
            out.add(name, value)
        return out.finished()

    def target(self, pointer: object, path: str, depth: int, *, merged: bool) -> dict[str, Any]:
        """The compiled `$ref`: a reference into the table of definitions."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            what = "must point into the schema itself, as '#/$defs/…'"
            self.fault(path, "unsupported", what)
            return {}
        key = (self._n_documents, pointer, merged)
        if key not in self._names:
            found = _resolved(self._document, pointer)
            if found is _MISSING:
                self.fault(path, "unknown", "has no target")
                return {}
            self.count(1, "targets of references")
            name = self._names[key] = f"d{len(self._names)}"
            self._referrers[name] = path
            # The name is assigned before the visit, because the target may refer to itself.
            where = self._path
            for step in pointer.split("/")[1:]:
                where = _below(where, step)
            self.definitions[name] = self.visit(found, where, depth + 1, merged=merged)
        return {"$ref": proofs.DEFINITIONS + self._names[key]}

    def target_of(self, compiled: Any) -> Any:
        """What a compiled schema refers to, if it is only a reference."""
        if isinstance(compiled, dict) and compiled.keys() == {"$ref"}:
            return self.definitions[compiled["$ref"].removeprefix(proofs.DEFINITIONS)]
        return compiled

    def pattern(self, text: str, format: object) -> str | None:
        """The regular expression to enforce; `None` if it cannot be, or exceeds the total size."""
        found = patterns.pattern_of(text, format)
        if found is None or (size := sizes.size(found)) > self._size_left:
            return None
        self._size_left -= size
        return found

    def names(self, schema: object) -> str | None:
        """A schema of property names as a regular expression, if it is a pattern or constants."""
        found = self._followed(schema)
        if not isinstance(found, Mapping) or len(found.keys() - _NOT_ABOUT_NAMES) != 1:
            return None
        if found.get("type", "string") != "string":
            return None
        text, values = found.get("pattern"), found.get("enum") or [found.get("const")]
        if isinstance(values, list) and all(isinstance(each, str) for each in values):
            text = f"^(?:{'|'.join(map(re.escape, values))})$"
        return self.pattern(text, None) if isinstance(text, str) else None

    def _followed(self, schema: object) -> object:
        for _ in range(8):
            if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
                break
            schema = _resolved(self._document, schema["$ref"])
        return schema

    def are_disjoint(self, branches: Sequence[object], *, merged: bool) -> bool:
        self._n_pairs += len(branches) ** 2 // 2
        if self._n_pairs > MAX_PAIRS:
            return False
        return proofs.are_disjoint(list(map(self._followed, branches)), says_constants=not merged)


_MISSING = object()


def _resolved(document: object, pointer: str) -> object:
    """The target of a JSON pointer in a fragment (`#/$defs/a`), or `_MISSING`."""
    found = document
    for step in pointer[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key, _MISSING)
        elif isinstance(found, list) and key.isascii() and key.isdigit() and len(key) < 6:
            found = found[int(key)] if int(key) < len(found) else _MISSING
        else:
            return _MISSING
    return found


_COMBINED = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_NOT_ABOUT_NAMES = frozenset("type title description default".split())
"""Keywords that do not restrict a property's name, which is a string anyway."""


class _Part:
    """One subschema while it is rewritten, keyword by keyword in the client's order, which sets the
    order of the answer's properties."""

    def __init__(
        self, schemas: Schemas, path: str, depth: int, merged: bool, given: Schema
    ) -> None:
        self._schemas, self._path, self._depth = schemas, path, depth
        self._merged, self._given = merged, given
        self._out: dict[str, Any] = {}
        self._names: str | None = None
        """The regular expression of an object's property names."""

    def add(self, name: str, value: Any) -> None:
        path = _below(self._path, name)
        if name in keywords.NOT_ENFORCED:
            is_closed = name == "unevaluatedProperties" and self._closes
            if not is_closed and not keywords.says_nothing(name, value):
                self._schemas.leave_out(path)
        elif (keyword := _KEYWORDS.get(name)) is not None:
            if not keyword.takes(value):
                self._schemas.fault(path, "type", f"must be {keyword.noun}")
            elif (enforced := keyword.enforced(self, name, value, path)) is None:
                self._schemas.leave_out(path)
            else:
                self._out |= enforced

    def finished(self) -> Any:
        given, out = self._given, self._out
        if self._names is not None:
            out["patternProperties"] = {self._names: out.get("additionalProperties", True)}
            out["additionalProperties"] = False
        if not self._merged and not _COMBINED & given.keys():
            self._narrow(out)
        if given.get("nullable") is True:
            return {"anyOf": [out, {"type": "null"}]}
        return out

    @property
    def _closes(self) -> bool:
        """Whether to forbid further properties, with which models tend to ramble."""
        open_ended = {"additionalProperties", "patternProperties"} | _COMBINED
        return (
            "properties" in self._given and not self._merged and not open_ended & self._given.keys()
        )

    def _narrow(self, out: dict[str, Any]) -> None:
        """Narrow what the client left open to its most likely meaning."""
        if self._closes:
            names = out.get("properties", {})
            required = out.get("required", [])
            out["properties"] = names | {name: True for name in required if name not in names}
            out["required"] = list(dict.fromkeys([*required, *sorted(proofs.constants_in(names))]))
            out["additionalProperties"] = False
        if "prefixItems" in out and "items" not in self._given and "minItems" not in self._given:
            out["items"] = False
            n_items = len(out["prefixItems"])
            out["minItems"] = min(n_items, out.get("maxItems", n_items))
        if not {"type", "const", "enum"} & self._given.keys():
            kinds = [kind for kind, own in keywords.OF_TYPE.items() if own & self._given.keys()]
            if len(kinds) == 1:
                out["type"] = kinds[0]

    # --- what is enforced for a keyword; `None` where it cannot be -------------------------

    def _visit(self, schema: object, path: str) -> Any:
        return self._schemas.visit(schema, path, self._depth + 1, merged=self._merged)

    def _visit_all(self, schemas: Sequence[object], path: str) -> list[Any]:
        return [self._visit(part, f"{path}[{index}]") for index, part in enumerate(schemas)]

    def _reference(self, name: str, value: Any, path: str) -> _Enforced:
        return self._schemas.target(value, path, self._depth, merged=self._merged)

    def _type(self, name: str, value: Any, path: str) -> _Enforced:
        return {name: value if isinstance(value, str) else list(dict.fromkeys(value))}

    def _combination(self, name: str, parts: Any, path: str) -> _Enforced:
        visited = self._visit_all(parts, path)
        if name == "oneOf":
            if len(parts) > 1 and not self._schemas.are_disjoint(parts, merged=self._merged):
                self._schemas.leave_out(path)
            name = "anyOf"
        if name == "allOf" and len(visited) == 1 and not self._merged and visited[0] is not False:
            [only] = visited
            return only if isinstance(only, dict) else {}
        if name in self._out:
            return {"allOf": [*self._out.get("allOf", ()), {name: visited}]}
        return {name: visited}

    def _values(self, name: str, value: Any, path: str) -> _Enforced:
        self._schemas.count(len(value) if name == "enum" else 1, "values in enum and const")
        return None if keywords.has_wide_number(value) else {name: value}

    def _members(self, name: str, value: Mapping[str, Any], path: str) -> _Enforced:
        self._schemas.count_names(len(value), "properties")
        members: dict[str, Any] = {}
        for key, part in value.items():
            text = self._schemas.pattern(key, None) if name == "patternProperties" else key
            if text is None:
                self._schemas.leave_out(_below(path, key))
            else:
                members[text] = self._visit(part, _below(path, key))
        return {name: members}

    def _required(self, name: str, value: list[str] | bool, path: str) -> _Enforced:
        if isinstance(value, bool):  # draft 3 had it in the property
            return None if value else {}
        self._schemas.count_names(len(value), "required names")
        return {name: list(dict.fromkeys(value))}

    def _property_names(self, name: str, value: Any, path: str) -> _Enforced:
        """Enforced only if nothing else names the object's properties."""
        if not self._merged and not {"properties", "patternProperties"} & self._given.keys():
            self._names = self._schemas.names(value)
        return {} if self._names is not None or keywords.says_nothing(name, value) else None

    def _items(self, name: str, value: Any, path: str) -> _Enforced:
        if name == "prefixItems" or (name == "items" and isinstance(value, list)):
            return {"prefixItems": self._visit_all(value, path)}
        if name == "additionalItems":  # the name of items before 2020, where that is a list
            is_list = isinstance(self._given.get("items"), list)
            return {"items": self._visit(value, path)} if is_list else {}
        return {name: self._visit(value, path)}

    def _count(self, name: str, value: float, path: str) -> _Enforced:
        meets_pattern = name == "minLength" and (self._merged or "pattern" in self._given)
        most = keywords.MAX_LENGTH_OF_PATTERN if meets_pattern else keywords.MAX_COUNT
        return {name: int(value)} if value <= most else None

    def _multiple(self, name: str, value: float, path: str) -> _Enforced:
        is_enforced = not self._merged and keywords.is_small_multiple(value)
        return {name: value} if is_enforced else None

    def _exclusive(self, name: str, value: float | bool, path: str) -> _Enforced:
        if not isinstance(value, bool):
            return self._bound(name, value, path)
        inclusive: Any = self._given.get("minimum" if name.endswith("Minimum") else "maximum")
        return self._bound(name, inclusive, path) if value and is_number(inclusive) else {}

    def _bound(self, name: str, value: float, path: str) -> _Enforced:
        narrowed = keywords.bound(name, value)
        if narrowed is None:
            return None
        name, value = narrowed
        if name in self._out:  # two bounds became one; the narrower holds
            pick = max if name.lower().endswith("minimum") else min
            value = pick(value, self._out[name])
        return {name: value}

    def _pattern(self, name: str, value: str, path: str) -> _Enforced:
        found = self._schemas.pattern(value, self._given.get("format"))
        return None if found is None else {name: found}

    def _format(self, name: str, value: str, path: str) -> _Enforced:
        """A number's format (`int32`, `double`…) only says how to store it."""
        if value in keywords.FORMATS:
            return {name: value}
        is_number = proofs.types_of(self._given) - {"null"} == {"number"}
        return {} if is_number or {"pattern", "allOf"} & self._given.keys() else None


class _Keyword(NamedTuple):
    """How a keyword is enforced."""

    enforced: Callable[[_Part, str, Any, str], _Enforced]
    noun: str = ""
    """What its value must be, for faults."""
    takes: Callable[[Any], bool] = lambda value: True


_A_LIST = ("a list that is not empty", lambda value: isinstance(value, list) and value != [])
_AN_OBJECT = ("an object of schemas", lambda value: isinstance(value, Mapping))
_A_STRING = ("a string", lambda value: isinstance(value, str))
_TYPES = f"one of {', '.join(sorted(keywords.TYPES))}, or a list of them"
_TABLE: Mapping[str, _Keyword] = {
    "$ref": _Keyword(_Part._reference),
    "anyOf oneOf allOf": _Keyword(_Part._combination, *_A_LIST),
    "type": _Keyword(_Part._type, _TYPES, keywords.is_type),
    "const": _Keyword(_Part._values),
    "enum": _Keyword(_Part._values, *_A_LIST),
    "properties patternProperties": _Keyword(_Part._members, *_AN_OBJECT),
    "required": _Keyword(_Part._required, "a list of property names", keywords.is_required),
    "propertyNames": _Keyword(_Part._property_names),
    "prefixItems": _Keyword(_Part._items, *_A_LIST),
    "items": _Keyword(
        _Part._items, "a schema, or a list that is not empty", lambda value: value != []
    ),
    "additionalItems additionalProperties": _Keyword(_Part._items),
    "minLength maxLength minItems maxItems": _Keyword(
        _Part._count, "a whole number from 0", lambda n: is_number(n) and n >= 0 and n == int(n)
    ),
    "minimum maximum": _Keyword(_Part._bound, "a number", is_number),
    # In draft 4, a boolean says whether `minimum` or `maximum` is exclusive.
    "exclusiveMinimum exclusiveMaximum": _Keyword(
        _Part._exclusive, "a number", lambda n: isinstance(n, bool) or is_number(n)
    ),
    "multipleOf": _Keyword(_Part._multiple, "a number above 0", lambda n: is_number(n) and n > 0),
    "pattern": _Keyword(_Part._pattern, *_A_STRING),
    "format": _Keyword(_Part._format, *_A_STRING),
}
_KEYWORDS = {name: keyword for names, keyword in _TABLE.items() for name in names.split()}
