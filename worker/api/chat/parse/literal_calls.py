"""Reads calls in Gemma 4's notation and in Python's, each as a whole. Pure functions, any thread.

Gemma's is `call:name{key:<|"|>text<|"|>}`, Python's `[name(key="text"), …]`. A call that cannot be
read is none, and so is one of which it is not sure what it says.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from worker.api.chat.parse.json_calls import to_json

QUOTE: Final = '<|"|>'
_HEADER: Final = re.compile(r"\s*call:([^{}\s]+?)\s*\{")
_KEY: Final = re.compile(r"\s*([^:{}\[\],\s]+)\s*:\s*")
_COLON: Final = re.compile(r"\s*:\s*")
_SEPARATOR: Final = re.compile(r"\s*(,?)\s*")
_BARE: Final = re.compile(r"[^,\]\}]+")
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_BETWEEN_QUOTES: Final = re.compile(r"='([^']*)'")
_UNSURE: Final = re.compile(r"Q\s*Q|#|\\")
"""Beside strings, `Q`: strings that Python joins, comments and continued lines."""
_MAX_DEPTH = 50
_MAX_CHARS = 200_000
_WORDS = {"true": True, "false": False, "null": None, "None": None}

WholeCall = tuple[str, str]
"""A function's name and its arguments as JSON."""


def gemma_calls(text: str) -> list[WholeCall]:
    header = _HEADER.match(text)
    if header is None or len(text) > _MAX_CHARS:
        return []
    try:
        value, end = _value(text, header.end() - 1, 0)
        return [] if text[end:].strip() else [(header[1], to_json(value))]
    except ValueError:
        return []


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at index `at` and the index after it; raises `ValueError` if there is none."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    sign = text[at : at + 1]
    if sign == "{":
        return _members(text, at + 1, depth)
    if sign == "[":
        return _items(text, at + 1, depth)
    if sign == '"':
        return json.JSONDecoder(strict=False).raw_decode(text, at)
    found = _BARE.match(text, at)
    if found is None:
        raise ValueError("no value")
    word = found[0].strip()
    try:
        return _WORDS[word] if word in _WORDS else json.loads(word), found.end()
    except ValueError:
        return word, found.end()


def _members(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while (at := _next_entry(text, at, "}", is_first=not members)) >= 0:
        if text.startswith(QUOTE, at):
            key, at = _value(text, at, depth)
            found = _COLON.match(text, at)
        else:
            found = _KEY.match(text, at)
            key = found[1] if found is not None else ""
        if found is None or key in members:
            raise ValueError("no key")
        members[key], at = _value(text, found.end(), depth + 1)
    return members, -at


def _items(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while (at := _next_entry(text, at, "]", is_first=not items)) >= 0:
        item, at = _value(text, at, depth + 1)
        items.append(item)
    return items, -at


def _next_entry(text: str, at: int, end: str, *, is_first: bool) -> int:
    """The index of the next entry; behind `end`, that index as a negative number."""
    found = _SEPARATOR.match(text, at)
    assert found is not None
    if text.startswith(end, found.end()):
        return -found.end() - 1
    if not is_first and not found[1]:
        raise ValueError("no comma")
    return found.end()


def python_calls(text: str) -> list[WholeCall]:
    """The calls in a Python expression: a call, or a list of calls, with keyword arguments only."""
    return _python(_QUOTED.sub(lambda found: found[0].replace("\n", "\\n"), text.strip()))


def unescaped_calls(text: str) -> list[WholeCall]:
    """As `python_calls`, where an argument's text stands between `'` just as it is."""
    return _python(_BETWEEN_QUOTES.sub(lambda found: f"={found[1]!r}", text.strip()))


def _python(source: str) -> list[WholeCall]:
    if len(source) > _MAX_CHARS or _UNSURE.search(_QUOTED.sub("Q", source)):
        return []
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                return []
            arguments = {word.arg or "": _literal(word.value) for word in call.keywords}
            found.append((ast.unparse(call.func), to_json(arguments)))
        return found
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return []


def _literal(node: ast.expr) -> Any:
    """The value of a Python literal; JSON's own words are understood as well."""
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            part.values = [_named(value) for value in part.values]
        elif isinstance(part, ast.List | ast.Tuple):
            part.elts = [_named(value) for value in part.elts]
    return ast.literal_eval(_named(node))


def _named(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)
    return node


NOTATIONS: Mapping[str, Callable[[str], list[WholeCall]]] = {
    "gemma": gemma_calls,
    "python": python_calls,
    "unescaped": unescaped_calls,
}
