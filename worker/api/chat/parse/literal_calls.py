"""Reads calls in Gemma's notation and in Python's, each as a whole. Pure functions, any thread.

Gemma's is `call:name{key:<|"|>text<|"|>}`, Python's `[name(key="text"), …]`. Text that cannot be
parsed, or that is ambiguous, is not a call.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from worker.api.chat.parse.json_values import strict_word, to_json

_HEADER: Final = re.compile(r"\s*call:([^{}\s]+?)\s*\{")
_GEMMA: Final = re.compile(
    r"""(?P<quote> <\|"\|> | <escape> ) (?P<text> .*? ) (?P=quote)
    | "(?: [^"\\] | \\. )*+"
    | (?<=[{,]) \s* (?P<key> [^:{}\[\],\s"<]+ ) \s* :
    | (?P<last> , \s* ) (?=[\]}])
    | [\s{}\[\]:,]
    | (?P<word> [^,\[\]{}"] [^,\[\]{}]* )""",
    re.VERBOSE | re.DOTALL,
)
"""A text · a JSON string · a key · a trailing comma · a bracket or separator · a bare word."""
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.)*+(?:'|\Z)|"(?:[^"\\]|\\.)*+(?:"|\Z)""", re.DOTALL)
"""An open string extends to the end, as trying again at each later quote is quadratic."""
_BETWEEN_QUOTES: Final = re.compile(r"(?<=[(,\s])(\w+)='([^']*)'")
"""An argument that is a text. The look-behind skips a text in a list that contains `='`."""
_UNSURE: Final = re.compile(r"Q\s*Q|#|\\")
"""With each string as `Q`, what is ambiguous: joined strings, comments and continued lines."""
_MAX_CHARS = 200_000
_MAX_LITERAL_CHARS = 20_000
_NO_PYTHON = (SyntaxError, TypeError, ValueError, RecursionError, MemoryError)
_WORDS = {"true": True, "false": False, "null": None, "None": None}

WholeCall = tuple[str, str]
"""A function's name and its arguments as JSON."""


def gemma_calls(text: str) -> list[WholeCall]:
    header = _HEADER.match(text)
    if header is None or len(text) > _MAX_CHARS:
        return []
    try:
        written = _GEMMA.sub(_in_json, text[header.end() - 1 :])
        return [(header[1], to_json(json.loads(written, strict=False, object_pairs_hook=_members)))]
    except (ValueError, RecursionError):
        return []


def _in_json(found: re.Match[str]) -> str:
    """A token of Gemma's notation as JSON; brackets, commas and colons are the same."""
    match found.lastgroup:
        case "key":
            return f"{to_json(found['key'])}:"
        case "text":
            return to_json(found["text"])
        case "word":
            return strict_word(found["word"].rstrip())
        case "last":
            return ""
    return found[0]


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key occurs twice")
    return members


def python_calls(text: str) -> list[WholeCall]:
    """The calls in a Python expression: a call, or a list of calls, with keyword arguments only."""
    return _python(_QUOTED.sub(lambda found: found[0].replace("\n", "\\n"), text.strip()))


def unescaped_calls(text: str) -> list[WholeCall]:
    """Like `python_calls`, but an argument's text is between `'`, without escapes."""
    return _python(_BETWEEN_QUOTES.sub(lambda found: f"{found[1]}={found[2]!r}", text.strip()))


def _python(source: str) -> list[WholeCall]:
    if len(source) > _MAX_CHARS or _UNSURE.search(_QUOTED.sub("Q", source)):
        return []
    try:
        tree = _parsed(source)
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        found = []
        for call in calls:
            if not isinstance(call, ast.Call) or call.args:
                return []
            arguments = {word.arg: _literal(word.value) for word in call.keywords}
            if None in arguments:  # `**`: the names are in its value
                return []
            found.append((ast.unparse(call.func), to_json(arguments)))
        return found
    except _NO_PYTHON:
        return []


def json_of_python(text: str) -> str | None:
    """JSON for a list or an object in Python's notation; `None` if it is neither."""
    if text[:1] not in ("{", "[") or len(text) > _MAX_LITERAL_CHARS:
        return None
    try:
        return to_json(_literal(_parsed(text)))
    except _NO_PYTHON:
        return None


def _parsed(source: str) -> ast.expr:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(source, mode="eval").body


def _literal(node: ast.expr) -> Any:
    """The value of a Python literal; JSON's words are understood, too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            part.values = [_with_word(value) for value in part.values]
        elif isinstance(part, ast.List | ast.Tuple):
            part.elts = [_with_word(value) for value in part.elts]
    return ast.literal_eval(_with_word(node))


def _with_word(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)
    return node


class Notation(NamedTuple):
    calls: Callable[[str], list[WholeCall]]
    """Parses the calls in a text; empty if it cannot."""
    quotes: tuple[str, ...]
    """The quotes around its texts."""


GEMMA: Final = Notation(gemma_calls, ('<|"|>', "<escape>", '"'))
"""The quotes of Gemma 4, of FunctionGemma and of JSON."""
PYTHON: Final = Notation(python_calls, ('"', "'"))
UNESCAPED: Final = Notation(unescaped_calls, ())
