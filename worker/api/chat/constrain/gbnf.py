"""Rewrites raw grammars in llama.cpp's GBNF as Lark for llguidance, token by token.

Each character becomes a terminal of its own, because llguidance's lexer is greedy: with longer
terminals, `[a-z]+ "end"` would never reach its end. llguidance's own `gbnf_to_lark` joins them, so
that nothing follows `root ::= word "end"` with `word ::= [a-z]+`. Pure functions, any thread.
"""

from __future__ import annotations

import re

from worker.api.http.faults import refusal
from worker.errors import InvalidRequest

MAX_RULES = 400
MAX_SYMBOLS = 4000
"""The most tokens and characters of literals and classes in all rules."""
_MAX_DEPTH = 32
_MAX_REPETITIONS = 100_000

_CHARACTER = r"""(?:\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[nrt\\"\[\]-]|[^\\])"""
_TOKEN = re.compile(
    rf"""(?P<blank> [ \t]+ | \#[^\r\n]* )
    | (?P<line_end> [\r\n]+ )
    | (?P<rule> [\w-]+ ) [ \t]* ::=
    | (?P<name> [\w-]+ )
    | "(?P<literal> (?: (?!") {_CHARACTER} )*+ )"
    | \[(?P<negated> \^? )(?P<members> (?: (?!\]) {_CHARACTER} )++ )\]
    | (?P<repetition> [*+?] | \{{ [ ]* \d{{1,8}} [ ]* (?: , [ ]* (?: \d{{1,8}} )? [ ]* )? \}} )
    | (?P<sign> [().|] )
    """,
    re.VERBOSE | re.ASCII,
)
_LETTER = re.compile(_CHARACTER)
_MEMBER = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?")
_ESCAPED = {"n": 10, "r": 13, "t": 9}
_NOT_READ = {
    '"': "a text has no end, or an unknown escape",
    "[": "a class has no end, no characters or an unknown escape",
    "{": "expected {n}, {n,} or {n,m}",
    "<": "tokens cannot be named in a grammar here",
    "!": "tokens cannot be named in a grammar here",
}
"""What is wrong where no token begins, by the character there."""


def to_lark(text: str, path: str) -> str:
    """
    Raises:
        InvalidRequest: the grammar is invalid or too large; `path` is the field at fault.
    """
    return _Reader(text, path).read()


class _Reader:
    def __init__(self, text: str, path: str) -> None:
        self._text, self._path, self._at = text, path, 0
        self._names = {"root": "start"}
        """Every rule that was named so far, with its name in Lark."""
        self._rules: dict[str, list[str]] = {}
        self._rule: list[str] | None = None
        """The rule that is being read, in Lark; `None` between two."""
        self._repeated = [[1.0, 1.0]]
        """Of the rule and each open group in it: how often its last part may stand there, by the
        repetitions in one another, and how often the others may at most."""
        self._n_symbols = 0

    @property
    def _depth(self) -> int:
        return len(self._repeated) - 1

    def read(self) -> str:
        while self._at < len(self._text):
            token = _TOKEN.match(self._text, self._at)
            if token is None:
                reason = _NOT_READ.get(self._text[self._at], "no part of a grammar begins so")
                raise self._error(reason)
            self._take(token)
            self._at = token.end()
        self._end_rule()
        for name, lark_name in self._names.items():
            if lark_name not in self._rules:
                raise self._refusal(f"there is no rule {name!r}")
        return "\n".join(f"{name}: {' '.join(parts)}" for name, parts in self._rules.items())

    def _take(self, token: re.Match[str]) -> None:
        kind, found = token.lastgroup, token[0]
        if kind == "blank":
            return
        if kind == "line_end":
            if not self._depth and not self._expects_a_part:
                self._end_rule()
            return
        if kind == "rule":
            if self._rule is not None:
                raise self._error("expected the end of the rule")
            self._rule = self._rules[self._lark_name(token["rule"])] = []
            return
        if self._rule is None:
            raise self._error("expected ::=")
        self._count(1)
        match kind:
            case "name":
                self._part(self._rule, self._lark_name(found))
            case "literal":
                self._part(self._rule, self._literal(token["literal"]))
            case "members":
                members = f"/[{token['negated']}{self._members(token['members'])}]/"
                self._part(self._rule, members)
            case "repetition":
                if self._expects_a_part or self._rule[-1][-1] in "*+?}":
                    raise self._error("a repetition must follow a part; ( ) make a part of several")
                numbers = [int(number) for number in re.findall(r"\d+", found)]
                self._repeated[-1][0] *= max(numbers, default=1) or 1
                if self._repeated[-1][0] > _MAX_REPETITIONS:
                    raise self._error(f"more than {_MAX_REPETITIONS} repetitions in one another")
                if numbers and not any(numbers) and not re.search(r",\s*\}", found):
                    _empty_last_part(self._rule)
                else:
                    self._rule[-1] += found.replace(" ", "")
            case _:
                self._sign(self._rule, found)

    @property
    def _expects_a_part(self) -> bool:
        """Whether an alternative has just begun, whose parts may stand on a line of their own."""
        return self._rule is not None and self._rule[-1:] in ([], ["("], ["|"])

    def _part(self, rule: list[str], part: str, repeated: float = 1) -> None:
        rule.append(part)
        self._repeated[-1] = [repeated, max(self._repeated[-1])]

    def _sign(self, rule: list[str], sign: str) -> None:
        if sign == ".":
            self._part(rule, "/(?s:.)/")
            return
        if sign != "(" and self._expects_a_part:
            rule.append('""')
        if sign == ")":
            if not self._depth:
                raise self._error("expected the end of the rule")
            self._part(rule, sign, max(self._repeated.pop()))
            return
        if sign == "(":
            self._repeated.append([1, 1])
        if self._depth > _MAX_DEPTH:
            raise self._error("groups are nested too deeply")
        rule.append(sign)

    def _end_rule(self) -> None:
        if self._depth:
            raise self._error("expected )")
        if self._rule is not None and self._expects_a_part:
            self._rule.append('""')
        self._rule = None
        self._repeated = [[1, 1]]

    def _lark_name(self, name: str) -> str:
        if name not in self._names and len(self._names) > MAX_RULES:
            raise self._refusal(f"it has more than {MAX_RULES} rules")
        return self._names.setdefault(name, f"r{len(self._names)}")

    def _literal(self, text: str) -> str:
        codes = [self._code(each) for each in _LETTER.findall(text)]
        self._count(len(codes))
        return "(" + " ".join(f"/\\x{{{code:x}}}/" for code in codes) + ")" if codes else '("")'

    def _members(self, text: str) -> str:
        ranges = []
        for low, high in _MEMBER.findall(text):
            first, last = self._code(low), self._code(high or low)
            if first > last:
                raise self._error("a range of characters goes backwards")
            ranges.append(f"\\x{{{first:x}}}-\\x{{{last:x}}}")
        self._count(len(ranges))
        return "".join(ranges)

    def _code(self, text: str) -> int:
        """Of a character, or of an escape."""
        if text[0] != "\\":
            code = ord(text)
        elif len(text) > 2:
            code = int(text[2:], 16)
        else:
            code = _ESCAPED.get(text[1], ord(text[1]))
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error("not a Unicode character")
        return code

    def _count(self, n: int) -> None:
        self._n_symbols += n
        if self._n_symbols > MAX_SYMBOLS:
            raise self._refusal(f"it has more than {MAX_SYMBOLS} symbols")

    def _error(self, reason: str) -> InvalidRequest:
        line = self._text.count("\n", 0, self._at) + 1
        return self._refusal(f"line {line}: {reason}")

    def _refusal(self, reason: str) -> InvalidRequest:
        return refusal(self._path, "unsupported", f"is not a valid grammar: {reason}")


def _empty_last_part(rule: list[str]) -> None:
    """Make the last part empty, which may be a group: Lark has no repetition of no times."""
    depth = 0
    while True:
        part = rule.pop()
        depth += part.startswith(")") - (part == "(")
        if depth == 0:
            break
    rule.append('""')
