"""Turns a custom tool's grammar into one regular expression, which can constrain a string in JSON.

It reads Lark as OpenAI's clients send it. A recursive grammar has no such expression, and some
features of Lark are not supported; text that is not a grammar is refused. Pure functions, any
thread.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import lru_cache

from worker.api.chat.constrain.patterns import MAX_CHARS as MAX_PATTERN_CHARS
from worker.api.chat.constrain.sizes import SAYS_VERBOSE, Tokens, definitions_of
from worker.api.chat.request import TextForm
from worker.api.http.faults import refusal
from worker.errors import InvalidRequest

MAX_CHARS = 16_000
"""The most characters of a form that is checked; a longer one is only shown to the model."""
MAX_CHARS_OF_ALL = 32_000
"""The most characters of all forms of a request. Checking so many takes at most 0.3 s."""
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""The supported terminals of Lark's `common` grammar."""
_SPECIAL = re.compile(
    r"\\(?:[nrtf\"\\]|x[0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})?|[.+*?()|\[\]{}^$]"
)
"""In a text: escapes that regular expressions have, too, and their special characters."""
_SIGNS = {"(": "(?:", "[": "(?:", ")": ")", "]": ")?", "|": "|", "*": "*", "+": "+", "?": "?"}
_ENGINE_SPECIFIC = re.compile(
    r"\\(?:[xuUpP]\{[^{}]*\}|.)|-|(?<=\()\?(?:<?[=!]|P?<\w+>|[A-Za-z-]*:?)", re.DOTALL
)
"""Parts of a regular expression that engines write differently; none opens or closes anything."""


class _Unsupported(Exception):
    """A feature of Lark that is not supported here."""


@lru_cache(maxsize=32)
def pattern_of(form: TextForm) -> str | None:
    """The regular expression of a form; `None` if there is none, or this module cannot find it.

    Raises:
        InvalidRequest: it is not a valid grammar, or not a valid regular expression.
    """
    path = f"{form.path}.definition"
    if form.syntax == "lark":
        is_small = len(form.definition) <= MAX_CHARS
        return _Grammar(form.definition, path).expression() if is_small else None
    if SAYS_VERBOSE.search(form.definition):
        return None  # a comment may hide the end of a group
    if fault := _fault_in(form.definition):
        raise refusal(path, "unsupported", f"is not a valid regular expression: {fault}")
    return form.definition


def _fault_in(expression: str) -> str:
    """What is wrong with groups, classes and repetitions, which all engines read alike."""
    if len(expression) > MAX_CHARS:
        return ""
    with warnings.catch_warnings(action="ignore"):
        try:
            re.compile(_ENGINE_SPECIFIC.sub(lambda found: "a" * len(found[0]), expression))
        except re.error as error:
            if error.msg == "multiple repeat":  # valid in Rust: it repeats a repetition
                return ""
            return f"{error.msg}, at character {(error.pos or 0) + 1}"
        except (OverflowError, RecursionError):
            return ""  # it is too large
    return ""


class _Grammar:
    def __init__(self, text: str, path: str) -> None:
        self._text, self._path = text, path
        self._parts: dict[str, list[str]] = {}
        """The expression of each definition, in parts; those at odd indices are names."""
        self._used: dict[str, int] = {}
        """Where each name was used first."""
        self._is_supported = True
        for tokens in definitions_of(text):
            try:
                self._define(tokens)
            except _Unsupported:
                self._is_supported = False

    def expression(self) -> str | None:
        if not self._is_supported:
            return None
        for name, at in {"start": 0, **self._used}.items():
            if name not in self._parts:
                raise self._fault(f"there is no {name!r}", at)
        done, begun, due = dict[str, str](), set[str](), ["start"]
        while due:
            name = due[-1]
            if name in done:
                due.pop()
                continue
            parts = self._parts[name]
            if missing := [each for each in dict.fromkeys(parts[1::2]) if each not in done]:
                if name in begun:
                    return None  # it is recursive
                begun.add(name)
                due += missing
                continue
            found = "".join(done[part] if n % 2 else part for n, part in enumerate(parts))
            if len(found) > MAX_PATTERN_CHARS:
                return None
            done[name] = f"(?:{found})"
        return done["start"]

    def _define(self, tokens: Tokens) -> None:
        """Read a rule, a terminal or a directive."""
        first, rest = tokens[0], tokens[1:]
        if first[0] == "%":
            self._import([token[0] for token in rest], first.start())
            return
        if rest[:1] and rest[0][0] == ".":  # a priority follows
            rest = rest[2:]
        if first.lastgroup not in ("rule", "terminal") or not rest:
            raise self._fault("expected a name and ':'", first.start())
        if rest[0][0] != ":":
            if rest[0][0][0] in "{[":  # a template, or options of llguidance's
                raise _Unsupported
            raise self._fault("expected ':'", rest[0].start())
        parts, alias = [""], 0
        for number, token in enumerate(rest[1:]):
            if token[0] == "-":  # an alias, which changes no text
                alias = number + 3
            if number >= alias:
                self._add(parts, token)
        self._keep(first[0].lstrip("?!"), parts, first.start())
        if fault := _fault_in("a".join(parts[::2])):
            raise self._fault(fault.partition(", at")[0], first.start())

    def _keep(self, name: str, parts: list[str], at: int) -> None:
        if self._parts.setdefault(name, parts) != parts:
            raise self._fault(f"{name!r} is defined twice", at)

    def _import(self, words: Sequence[str], at: int) -> None:
        """Read an import of Lark's own terminals."""
        if words[:3] != ["import", "common", "."] and words[:3] != ["import", "common", "("]:
            raise _Unsupported
        names = [word for word in words[3:] if word not in (",", ")")]
        aliases = [names[3]] if names[1:3] == ["-", ">"] and len(names) == 4 else names
        for name, alias in zip(names, aliases, strict=False):
            if name not in _COMMON:
                raise _Unsupported
            self._keep(alias, [_COMMON[name]], at)

    def _add(self, parts: list[str], token: re.Match[str]) -> None:
        found = token[0]
        match token.lastgroup:
            case "text":
                text, flag = found[1:].rsplit('"', 1)
                written = _SPECIAL.sub(lambda sign: _in_expression(sign[0]), text)
                parts[-1] += f"(?{flag}:{written})"
            case "flags":
                expression = token["expression"].replace("\\/", "/")
                if set(token["flags"]) - set("ims") or SAYS_VERBOSE.search(expression):
                    raise _Unsupported
                if fault := _fault_in(expression):
                    raise self._fault(f"an expression is not valid: {fault}", token.start())
                parts[-1] += f"(?{token['flags']}:{expression})"
            case "rule" | "terminal":
                self._used.setdefault(found, token.start())
                parts += [found, ""]
            case "repetition" if numbers := re.findall("[0-9]+", found):
                is_open = "," in found or ".." in found
                least = "0" if re.match(r"[{~]\s*[,.]", found) else numbers[0]
                most = "" if is_open and found.rstrip()[-1] in ",." else numbers[-1]
                parts[-1] += f"{{{least},{most}}}"
            case "sign" if found == "}":
                pass  # the end of a repetition
            case "sign" if found in _SIGNS:
                parts[-1] += _SIGNS[found]
            case "sign" if found in '"/:':
                raise self._fault(f"unexpected {found!r}", token.start())
            case _:
                raise _Unsupported

    def _fault(self, reason: str, at: int) -> InvalidRequest:
        line = self._text.count("\n", 0, at) + 1
        what = f"is not a valid grammar: line {line}: {reason}"
        return refusal(self._path, "unsupported", what)


def _in_expression(sign: str) -> str:
    """An escape or special character of a text, as a regular expression.

    Raises:
        _Unsupported: an escape that parsers of Lark read differently.
    """
    if sign == "\\":
        raise _Unsupported
    return sign if sign[0] == "\\" else "\\" + sign
