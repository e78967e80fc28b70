"""Rewrites raw grammars in llama.cpp's GBNF as Lark for llguidance.

Every character becomes a terminal of its own, because llguidance's lexer is greedy: with longer
terminals, `[a-z]+ "end"` would never reach its end. Pure functions, any thread.
"""

from __future__ import annotations

import string

MAX_BYTES = 32_000
MAX_RULES = 400
MAX_SYMBOLS = 4000
"""The most characters in all literals, classes and rule names."""
_MAX_DEPTH = 32
_MAX_REPETITIONS = 100_000
_ESCAPES = {"n": 10, "r": 13, "t": 9, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class GbnfError(ValueError):
    """The fault of a grammar, with its line."""


def to_lark(text: str) -> str:
    """
    Raises:
        GbnfError: the grammar is invalid or too large.
    """
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise GbnfError(f"it has more than {MAX_BYTES} bytes")
    return _Parser(text).grammar()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth, self._n_symbols = text, 0, 0, 0
        self._names: dict[str, str] = {"root": "start"}
        self._rules: dict[str, str] = {}

    def grammar(self) -> str:
        self._skip(lines=True)
        while self._at < len(self._text):
            name = self._name()
            self._skip()
            if not self._text.startswith("::=", self._at):
                raise self._error("expected ::=")
            self._at += 3
            self._skip(lines=True)
            self._rules[self._reference(name)] = self._alternatives(nested=False)
            if self._peek() not in ("", "\n", "\r"):
                raise self._error("expected the end of the rule")
            self._skip(lines=True)
        for name, lark_name in self._names.items():
            if lark_name not in self._rules:
                raise GbnfError(f"there is no rule {name!r}")
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def _reference(self, name: str) -> str:
        if name not in self._names and len(self._names) > MAX_RULES:
            raise GbnfError(f"it has more than {MAX_RULES} rules")
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _count(self) -> None:
        self._n_symbols += 1
        if self._n_symbols > MAX_SYMBOLS:
            raise GbnfError(f"it has more than {MAX_SYMBOLS} symbols")

    def _alternatives(self, *, nested: bool) -> str:
        parts = [self._sequence(nested=nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(lines=True)
            parts.append(self._sequence(nested=nested))
        return " | ".join(parts)

    def _sequence(self, *, nested: bool) -> str:
        parts: list[str] = []
        while True:
            item = self._item()
            if item is None:
                return " ".join(parts) or '""'
            self._skip(lines=nested)
            repetition = self._repetition(lines=nested)
            parts.append(f"({item}){repetition}" if repetition else item)
            self._skip(lines=nested)

    def _item(self) -> str | None:
        self._count()
        sign = self._peek()
        if sign == '"':
            return self._literal()
        if sign == "[":
            return self._class()
        if sign == ".":
            self._at += 1
            return "/(?s:.)/"
        if sign == "(":
            return self._group()
        if sign in ("<", "!"):
            raise self._error("tokens cannot be named in a grammar here")
        if sign.isalnum():
            return self._reference(self._name())
        return None

    def _group(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error("groups are nested too deeply")
        self._at += 1
        self._skip(lines=True)
        body = self._alternatives(nested=True)
        if self._peek() != ")":
            raise self._error("expected )")
        self._at += 1
        self._depth -= 1
        return f"({body})"

    def _literal(self) -> str:
        self._at += 1
        parts = []
        while self._peek() != '"':
            self._count()
            parts.append(f"/{_character(self._character())}/")
        self._at += 1
        return f"({' '.join(parts)})" if parts else '""'

    def _class(self) -> str:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts = []
        while self._peek() != "]":
            low = high = self._character()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._character()
            if low > high:
                raise self._error("a range of characters goes backwards")
            parts.append(f"{_character(low)}-{_character(high)}")
        self._at += 1
        if not parts:
            raise self._error("a class has no characters")
        return f"/[{'^' * negated}{''.join(parts)}]/"

    def _repetition(self, *, lines: bool) -> str:
        sign = self._peek()
        if sign and sign in "*+?":
            self._at += 1
            return sign
        if sign != "{":
            return ""
        self._at += 1
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at : end].partition(",")
        limits = [limit.strip() for limit in (low, high)]
        if end < 0 or not all(_is_count(limit) for limit in limits if limit) or not limits[0]:
            raise self._error("expected {n}, {n,} or {n,m}")
        if any(int(limit) > _MAX_REPETITIONS for limit in limits if limit):
            raise self._error(f"more than {_MAX_REPETITIONS} repetitions")
        self._at = end + 1
        return f"{{{limits[0]}{comma}{limits[1]}}}"

    # --- characters ------------------------------------------------------------------------

    def _character(self) -> int:
        sign = self._peek()
        self._at += 1
        if sign != "\\":
            if not sign:
                raise self._error("the grammar ends too early")
            return self._checked(ord(sign))
        kind = self._peek()
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _HEX_DIGITS.get(kind, 0)]
        if (
            not digits
            or len(digits) < _HEX_DIGITS[kind]
            or not set(digits) <= set(string.hexdigits)
        ):
            raise self._error(f"unknown escape \\{kind}")
        self._at += len(digits)
        return self._checked(int(digits, 16))

    def _checked(self, code: int) -> int:
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error("not a Unicode character")
        return code

    def _name(self) -> str:
        start = self._at
        while self._peek().isalnum() or self._peek() in ("-", "_"):
            self._at += 1
        if start == self._at:
            raise self._error("expected a rule's name")
        return self._text[start : self._at]

    def _skip(self, *, lines: bool = False) -> None:
        """Skip blanks and comments; with `lines`, line ends too."""
        blanks = " \t\r\n" if lines else " \t"
        while sign := self._peek():
            if sign == "#":
                end = self._text.find("\n", self._at)
                self._at = end if end >= 0 else len(self._text)
            elif sign in blanks:
                self._at += 1
            else:
                return

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _error(self, message: str) -> GbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        return GbnfError(f"line {line}: {message}")


def _character(code: int) -> str:
    return f"\\x{{{code:x}}}"


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9
