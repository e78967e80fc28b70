"""Reads calls in Gemma 4's notation and in Python's, each as a whole. Any thread."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from worker.api.chat.parse.calls import Calls, Progress
from worker.api.chat.parse.forms import LiteralCall

_QUOTE = '<|"|>'
_HEADER = re.compile(r"\s*call:([^{}\s]+?)\s*\{")
_KEY = re.compile(r"\s*([^:{}\[\],\s]+)\s*:\s*")
_BARE = re.compile(r"[^,\]\}]+")
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_MAX_DEPTH = 50
_WORDS = {"true": True, "false": False, "null": None}
MAX_CHARS = 200_000


class LiteralReader:
    def __init__(self, form: LiteralCall, calls: Calls) -> None:
        self._form, self._calls = form, calls
        self.held = ""

    def advance(self, text: str, *, final: bool) -> Progress:
        self.held += text
        end = self.held.find(self._form.end)
        if end < 0 and not final:
            return "failed" if len(self.held) > MAX_CHARS else "more"
        body = self.held if end < 0 else self.held[:end]
        found = _READ[self._form.notation](body)
        found = [(name, arguments) for name, arguments in found if self._calls.is_offered(name)]
        if not found:
            return "failed"
        for name, arguments in found:
            self._calls.start(name)
            if arguments is not None:
                self._calls.arguments(json.dumps(arguments, ensure_ascii=False))
        self.held = "" if end < 0 else self.held[end + len(self._form.end) :]
        return "done"


def _gemma(text: str) -> list[tuple[str, Any]]:
    header = _HEADER.match(text)
    if header is None:
        return []
    try:
        value, _ = _gemma_value(text, header.end() - 1, 0)
    except ValueError:
        value = None  # the call was cut off
    return [(header[1], value)]


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at index `at` and the index after it; raises `ValueError` if there is none."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(_QUOTE, at):
        end = text.index(_QUOTE, at + len(_QUOTE))
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    sign = text[at : at + 1]
    if sign == "{":
        return _gemma_members(text, at + 1, depth)
    if sign == "[":
        return _gemma_items(text, at + 1, depth)
    if sign == '"':
        value, end = json.JSONDecoder(strict=False).raw_decode(text, at)
        return value, end
    found = _BARE.match(text, at)
    if found is None:
        raise ValueError("no value")
    word = found[0].strip()
    try:
        return _WORDS[word] if word in _WORDS else json.loads(word), found.end()
    except ValueError:
        return word, found.end()


def _gemma_members(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while True:
        at = _blanks(text, at)
        if text.startswith("}", at):
            return members, at + 1
        if text.startswith(_QUOTE, at):
            key, at = _gemma_value(text, at, depth)
            at = _blanks(text, at)
            if not text.startswith(":", at):
                raise ValueError("no value")
            at = _blanks(text, at + 1)
        else:
            found = _KEY.match(text, at)
            if found is None:
                raise ValueError("no key")
            key, at = found[1], found.end()
        members[key], at = _gemma_value(text, at, depth + 1)


def _gemma_items(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while True:
        at = _blanks(text, at)
        if text.startswith("]", at):
            return items, at + 1
        item, at = _gemma_value(text, at, depth + 1)
        items.append(item)


def _blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


def _python(text: str) -> list[tuple[str, Any]]:
    """The calls in a Python expression: a call, or a list of calls, with keyword arguments only."""
    source = _QUOTED.sub(lambda found: found[0].replace("\n", "\\n"), text.strip())
    cut = re.match(r"\[?\s*([A-Za-z_][\w.]*)\s*\(", source)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                return []
            arguments = {word.arg or "": _literal(word.value) for word in call.keywords}
            found.append((ast.unparse(call.func), arguments))
        return found
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return [(cut[1], None)] if cut else []


def _literal(node: ast.expr) -> Any:
    """The value of a Python literal; JSON's own words are understood as well."""
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            part.values = [_named(value) for value in part.values]
        elif isinstance(part, ast.List | ast.Tuple):
            part.elts = [_named(value) for value in part.elts]
    value = ast.literal_eval(_named(node))
    json.dumps(value)  # sets and bytes are not JSON
    return value


def _named(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)
    return node


_READ: dict[str, Callable[[str], list[tuple[str, Any]]]] = {"gemma": _gemma, "python": _python}
