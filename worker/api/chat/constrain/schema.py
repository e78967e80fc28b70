"""Compiles a client's JSON schema into the one that the engine enforces.

Clients send schemas as pydantic, zod, OpenAPI and the SDKs write them. Here a schema is checked
field by field, limited in size, and rewritten into what llguidance enforces: the same language or a
narrower one. A keyword that cannot be enforced is left out, and its path is reported. Pure
functions, any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.api.chat.constrain import keywords
from worker.api.chat.constrain.disjoint import are_disjoint, constants_in
from worker.api.chat.constrain.pointer import NOTHING, resolve
from worker.api.chat.constrain.report import MAX_BYTES, SchemaReport, TooLarge
from worker.api.http.faults import Fault

Schema = Mapping[str, Any]


@dataclass(slots=True)
class Compiled:
    """The `schema` that the answer follows, and the paths of the keywords that it leaves out."""

    schema: Any
    not_enforced: list[str]
    faults: list[Fault]


def compile_schemas(documents: Sequence[tuple[str, object]]) -> tuple[list[Any], Compiled]:
    """Compile several documents with one table of definitions, `schema["$defs"]`.

    A document is a path for messages and a schema. Its `$ref`s point into itself.
    """
    compiler = _Compiler()
    roots = [compiler.document(schema, path) for path, schema in documents]
    definitions = {"$defs": compiler.targets} if compiler.targets else {}
    report = compiler.report
    return roots, Compiled(definitions, report.not_enforced, report.faults)


def compile_schema(schema: object, path: str) -> Compiled:
    """Compile one document."""
    (root,), result = compile_schemas([(path, schema)])
    result.schema = {**root, **result.schema} if isinstance(root, dict) else root
    return result


class _Compiler:
    def __init__(self) -> None:
        self.report = SchemaReport()
        self.targets: dict[str, Any] = {}
        self._names: dict[tuple[int, str, bool], str] = {}
        self._document: object = None
        self._path = ""
        self._n_documents = 0

    def document(self, schema: object, path: str) -> Any:
        self._document, self._path = schema, path
        self._n_documents += 1
        try:
            if len(json.dumps(schema)) > MAX_BYTES:
                raise TooLarge(f"it has more than {MAX_BYTES} bytes")
            return self.visit(schema, path, 0, merged=False)
        except RecursionError:
            self.report.fault(path, "maxDepth", f"{path} is nested too deeply")
        except TooLarge as error:
            self.report.fault(path, "maxSize", f"{path} is too large: {error}")
        except ValueError:
            self.report.fault(path, "type", f"{path} must be JSON")
        return True

    def visit(self, schema: object, path: str, depth: int, *, merged: bool) -> Any:
        """The schema to enforce for `schema`. `merged` means that other schemas hold at the same
        place: this one must stay open, and sizes multiply."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            expected = "must be a JSON schema: an object, true or false"
            self.report.fault(path, "type", f"{path} {expected}")
            return True
        self.report.count_schema(depth)
        given = {name: value for name, value in schema.items() if value is not None}
        if "const" in schema:
            given["const"] = schema["const"]
        beside = _ASSERTIONS & given.keys()
        merged = merged or len(beside & _COMBINED) > (1 if beside <= _COMBINED else 0)
        parts = given.get("allOf")
        merged = merged or (isinstance(parts, list) and len(parts) > 1)
        out = _Part(self, path, depth, merged, given)
        for name, value in given.items():
            out.add(name, value)
        return out.finished()

    def target(self, pointer: object, path: str, depth: int, *, merged: bool) -> Any:
        """The compiled `$ref`: a reference into the table of definitions."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            self.report.fault(
                path, "unsupported", f"{path} must point into the schema itself, as '#/$defs/…'"
            )
            return {}
        key = (self._n_documents, pointer, merged)
        if key not in self._names:
            found = resolve(self._document, pointer)
            if found is NOTHING:
                self.report.fault(path, "unknown", f"{path} points at nothing")
                return {}
            self.report.count_target(len(self._names))
            name = self._names[key] = f"d{len(self._names)}"
            # The name is assigned before the visit, because the target may refer to itself.
            where = self._path + pointer[1:].replace("/", ".")
            self.targets[name] = self.visit(found, where, depth + 1, merged=merged)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def are_disjoint(self, branches: Sequence[object], *, merged: bool) -> bool:
        def followed(branch: object) -> object:
            for _ in range(8):
                if not (isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str)):
                    break
                branch = resolve(self._document, branch["$ref"])
            return branch

        return are_disjoint(list(map(followed, branches)), says_constants=not merged)


_COMBINED = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_ASSERTIONS = (
    _COMBINED
    | keywords.COUNTS
    | keywords.BOUNDS
    | frozenset(
        "type const enum properties patternProperties additionalProperties required items "
        "prefixItems additionalItems pattern format multipleOf".split()
    )
)


class _Part:
    """One subschema while it is rewritten, keyword by keyword in the client's order, which sets the
    order of the answer's properties."""

    def __init__(
        self, compiler: _Compiler, path: str, depth: int, merged: bool, given: Schema
    ) -> None:
        self._compiler, self._report = compiler, compiler.report
        self._path, self._depth = path, depth
        self._merged, self._given = merged, given
        self._out: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        path = f"{self._path}.{name}"
        if name in keywords.NOT_ENFORCED:
            is_closed = name == "unevaluatedProperties" and self._closes
            if not is_closed and not keywords.says_nothing(name, value):
                self._report.leave_out(path)
        elif name == "$ref":
            self._out |= self._compiler.target(value, path, self._depth, merged=self._merged)
        elif name in ("anyOf", "oneOf", "allOf"):
            self._combination(name, value, path)
        elif name == "type":
            self._type(value, path)
        elif name in ("const", "enum"):
            self._values(name, value, path)
        elif name in ("properties", "patternProperties"):
            self._members(name, value, path)
        elif name == "required":
            self._required(value, path)
        elif name in ("items", "prefixItems", "additionalItems", "additionalProperties"):
            self._items(name, value, path)
        elif name in keywords.COUNTS or name in keywords.BOUNDS or name == "multipleOf":
            self._number(name, value, path)
        elif name in ("pattern", "format"):
            self._text(name, value, path)

    def finished(self) -> Any:
        given, out = self._given, self._out
        if not self._merged and not _COMBINED & given.keys():
            self._narrow(out)
        if given.get("nullable") is True:
            return {"anyOf": [out, {"type": "null"}]}
        return out

    @property
    def _closes(self) -> bool:
        """Whether to forbid other properties, with which models tend to ramble."""
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
            out["required"] = list(dict.fromkeys([*required, *sorted(constants_in(names))]))
            out["additionalProperties"] = False
        if "prefixItems" in out and "items" not in self._given and "minItems" not in self._given:
            out["items"] = False
            n_items = len(out["prefixItems"])
            out["minItems"] = min(n_items, out.get("maxItems", n_items))
        if not {"type", "const", "enum"} & self._given.keys():
            kinds = [kind for kind, own in keywords.OF_TYPE.items() if own & self._given.keys()]
            if len(kinds) == 1:
                out["type"] = kinds[0]

    # --- keywords --------------------------------------------------------------------------

    def _visit(self, schema: object, path: str) -> Any:
        return self._compiler.visit(schema, path, self._depth + 1, merged=self._merged)

    def _visit_all(self, schemas: object, path: str) -> list[Any]:
        """The schemas of a list; none after a fault."""
        if not isinstance(schemas, list) or not schemas:
            self._fault(path, "type", "must be a list of schemas with at least one in it")
            return []
        return [self._visit(part, f"{path}[{index}]") for index, part in enumerate(schemas)]

    def _combination(self, name: str, parts: Any, path: str) -> None:
        visited = self._visit_all(parts, path)
        if not visited:
            return
        if name == "oneOf":
            if len(parts) > 1 and not self._compiler.are_disjoint(parts, merged=self._merged):
                self._report.leave_out(path)
            name = "anyOf"
        if name == "allOf" and len(visited) == 1 and not self._merged and visited[0] is not False:
            self._out |= visited[0] if isinstance(visited[0], dict) else {}
            return
        if name in self._out:
            self._out.setdefault("allOf", []).append({name: visited})
        else:
            self._out[name] = visited

    def _type(self, value: object, path: str) -> None:
        kinds = [value] if isinstance(value, str) else value
        if not isinstance(kinds, list) or not kinds:
            self._fault(path, "type", "must be a type's name or a list of them")
        elif not all(isinstance(kind, str) and kind in keywords.TYPES for kind in kinds):
            self._fault(path, "enum", f"must be one of {', '.join(sorted(keywords.TYPES))}")
        else:
            self._out["type"] = value if isinstance(value, str) else list(dict.fromkeys(kinds))

    def _values(self, name: str, value: object, path: str) -> None:
        if name == "enum" and (not isinstance(value, list) or not value):
            self._fault(path, "type", "must be a list of values with at least one in it")
            return
        self._report.count_values(len(value) if isinstance(value, list) and name == "enum" else 1)
        self._out[name] = value

    def _members(self, name: str, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            self._fault(path, "type", "must be an object with a schema for each name")
            return
        self._report.count_properties(len(value))
        members: dict[str, Any] = {}
        for key, part in value.items():
            text: str | None = key
            if name == "patternProperties":
                text = keywords.pattern(key, None)
            if text is None:
                self._report.leave_out(f"{path}.{key}")
            else:
                members[text] = self._visit(part, f"{path}.{key}")
        self._out[name] = members

    def _required(self, value: object, path: str) -> None:
        if isinstance(value, bool):
            return  # only draft 3 had it in the property
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._fault(path, "type", "must be a list of property names")
            return
        self._report.count_required(len(value))
        self._out["required"] = list(dict.fromkeys(value))

    def _items(self, name: str, value: object, path: str) -> None:
        if name == "prefixItems" or (name == "items" and isinstance(value, list)):
            if parts := self._visit_all(value, path):
                self._out["prefixItems"] = parts
        elif name == "additionalItems":
            if isinstance(self._given.get("items"), list):  # its name before 2020
                self._out["items"] = self._visit(value, path)
        else:
            self._out[name] = self._visit(value, path)

    def _number(self, name: str, value: Any, path: str) -> None:
        if isinstance(value, bool) and name in ("exclusiveMinimum", "exclusiveMaximum"):
            # As in draft 4, where it said how the other bound is meant.
            inclusive: Any = self._given.get("minimum" if name.endswith("Minimum") else "maximum")
            if value and keywords.is_number(inclusive):
                self._bound(name, inclusive, path)
        elif not keywords.is_number(value) or (name == "multipleOf" and value <= 0):
            self._fault(path, "type", "must be a number" + " above 0" * (name == "multipleOf"))
        elif name in keywords.COUNTS:
            if value < 0 or value != int(value):
                self._fault(path, "type", "must be a whole number from 0")
            else:
                self._keep(name, int(value) if value <= keywords.MAX_COUNT else None, path)
        elif name == "multipleOf":
            is_enforced = not self._merged and keywords.is_small_multiple(value)
            self._keep(name, value if is_enforced else None, path)
        else:
            self._bound(name, value, path)

    def _bound(self, name: str, value: float, path: str) -> None:
        narrowed = keywords.bound(name, value)
        if narrowed is None:
            self._report.leave_out(path)
            return
        name, value = narrowed
        if name in self._out:  # two bounds became one; the narrower holds
            pick = max if name.lower().endswith("minimum") else min
            value = pick(value, self._out[name])
        self._out[name] = value

    @property
    def _is_number(self) -> bool:
        """For a number, `format` (`int32`, `double`…) says only how it is stored."""
        return self._given.get("type") in ("integer", "number")

    def _text(self, name: str, value: object, path: str) -> None:
        if not isinstance(value, str):
            self._fault(path, "type", "must be a string")
        elif name == "format":
            if value in keywords.FORMATS:
                self._out[name] = value
            elif not {"pattern", "allOf"} & self._given.keys() and not self._is_number:
                self._report.leave_out(path)
        else:
            self._keep(name, keywords.pattern(value, self._given.get("format")), path)

    def _keep(self, name: str, value: object, path: str) -> None:
        """Enforce a keyword with this value; `None` says that it cannot be enforced."""
        if value is None:
            self._report.leave_out(path)
        else:
            self._out[name] = value

    def _fault(self, path: str, constraint: str, expected: str) -> None:
        self._report.fault(path, constraint, f"{path} {expected}")
