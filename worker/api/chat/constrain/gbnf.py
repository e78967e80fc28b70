"""Rewrites raw grammars in llama.cpp's GBNF as Lark for llguidance, token by token.

Each character becomes a terminal of its own, because llguidance's lexer is greedy: with longer
terminals, `[a-z]+ "end"` would never reach its end. llguidance's own `gbnf_to_lark` joins them, so
that no text matches `root ::= word "end"` with `word ::= [a-z]+`. Pure functions, any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
_REASONS = {
    '"': "a text is not closed, or has an unknown escape",
    "[": "a class is not closed, is empty or has an unknown escape",
    "{": "expected {n}, {n,} or {n,m}",
    "<": "tokens cannot be named in a grammar here",
    "!": "tokens cannot be named in a grammar here",
}
"""The fault where no token matches, by the character there."""


def to_lark(text: str, path: str) -> str:
    """
    Raises:
        InvalidRequest: the grammar is invalid or too large; `path` is the field at fault.
    """
    return _Reader(text, path).read()


@dataclass(slots=True)
class _Group:
    """A group that is open, or the whole rule."""

    parts: list[str] = field(default_factory=list)
    """In Lark, with `|` between alternatives."""
    repeated: float = 1
    """How often the last part may occur: the product of its nested repetitions."""
    most_repeated: float = 1
    """The largest such number of the parts before it."""

    @property
    def expects_a_part(self) -> bool:
        """Whether an alternative has just begun; its parts may be on the next line."""
        return self.parts[-1:] in ([], ["|"])

    def add(self, part: str, repeated: float = 1) -> None:
        self.parts.append(part)
        self.repeated, self.most_repeated = repeated, max(self.repeated, self.most_repeated)

    def end_alternative(self) -> None:
        if self.expects_a_part:
            self.parts.append('""')


class _Reader:
    def __init__(self, text: str, path: str) -> None:
        self._text, self._path, self._at = text, path, 0
        self._names = {"root": "start"}
        """The name in Lark of each rule that was named so far."""
        self._rules: dict[str, _Group] = {}
        self._open: list[_Group] = []
        """The rule that is being read, and its nested groups; empty between two rules."""
        self._n_symbols = 0

    def read(self) -> str:
        while self._at < len(self._text):
            token = _TOKEN.match(self._text, self._at)
            if token is None:
                reason = _REASONS.get(self._text[self._at], "nothing in a grammar begins like this")
                raise self._error(reason)
            self._take(token)
            self._at = token.end()
        self._end_rule()
        for name, lark_name in self._names.items():
            if lark_name not in self._rules:
                raise self._refusal(f"there is no rule {name!r}")
        return "\n".join(f"{name}: {' '.join(rule.parts)}" for name, rule in self._rules.items())

    def _take(self, token: re.Match[str]) -> None:
        kind, found = token.lastgroup, token[0]
        match kind:
            case "line_end" if len(self._open) == 1 and not self._open[0].expects_a_part:
                self._end_rule()
                return
            case "blank" | "line_end":
                return
            case "rule":
                if self._open:
                    raise self._error("expected the end of the rule")
                rule = self._rules[self._lark_name(token["rule"])] = _Group()
                self._open.append(rule)
                return
        if not self._open:
            raise self._error("expected ::=")
        self._count(1)
        group = self._open[-1]
        match kind:
            case "name":
                group.add(self._lark_name(found))
            case "literal":
                group.add(self._literal(token["literal"]))
            case "members":
                group.add(f"/[{token['negated']}{self._members(token['members'])}]/")
            case "repetition":
                self._repeat(group, found)
            case _:
                self._sign(group, found)

    def _repeat(self, group: _Group, written: str) -> None:
        if group.expects_a_part or group.parts[-1][-1] in "*+?}":
            raise self._error("a repetition must follow a part; ( ) group several as one")
        numbers = [int(number) for number in re.findall(r"\d+", written)]
        group.repeated *= max(numbers, default=1) or 1
        if group.repeated > _MAX_REPETITIONS:
            raise self._error(f"nested repetitions multiply to more than {_MAX_REPETITIONS}")
        if numbers and not any(numbers) and not re.search(r",\s*\}", written):
            group.parts[-1] = '""'  # Lark has no repetition of zero times
        else:
            group.parts[-1] += written.replace(" ", "")

    def _sign(self, group: _Group, sign: str) -> None:
        match sign:
            case ".":
                group.add("/(?s:.)/")
            case "(":
                if len(self._open) > _MAX_DEPTH:
                    raise self._error("groups are nested too deeply")
                self._open.append(_Group())
            case "|":
                group.end_alternative()
                group.parts.append(sign)
            case ")":
                if len(self._open) == 1:
                    raise self._error("expected the end of the rule")
                group.end_alternative()
                self._open.pop()
                repeated = max(group.repeated, group.most_repeated)
                self._open[-1].add(f"( {' '.join(group.parts)} )", repeated)

    def _end_rule(self) -> None:
        if len(self._open) > 1:
            raise self._error("expected )")
        if self._open:
            self._open.pop().end_alternative()

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
        """The code point of a character or an escape."""
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
