"""How large regular expressions and grammars are once their repetitions are written out, which the
engine does before its own limits hold. Pure functions, any thread."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

MAX_SIZE = 20_000
"""Of an expression: the most characters and classes once its repetitions are written out, which the
engine does before its own limits hold. So many take it some 20 ms."""
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^{}]*+\}|.)", re.DOTALL)
_REPETITION = re.compile(r"\{\s*+([0-9]++)\s*+(?:(,)\s*+([0-9]++)?+\s*+)?+\}")
_CLASS_BEGINS = re.compile(r"\[\^?(?:-++|\]?)")
_MEMBER = re.compile(r"&&|--|~~|(?:\\.|.)(?:-(?![\]-])(?:\\.|.))?+", re.DOTALL)
"""Of a class: what joins two classes, a character or a range."""
_SAYS_VERBOSE = re.compile(r"\(\?[A-Za-wyz-]*+x")
_WIDE_CLASS = re.compile(r"\[(?:a-z|A-Z|0-9|\\[wds])(?:[^\\\[\]&~-]|-(?!-)|\\.)*+\]", re.DOTALL)
"""A class that certainly holds more than one character."""
_WIDE_ESCAPES = frozenset((r"\w", r"\W", r"\d", r"\D", r"\s", r"\S"))
_MAX_DIGITS = 9
_AMBIGUITY = 18
"""What a character costs that stands behind a part of several lengths. Where it must come next, it
takes the engine as long as all is large that may follow."""


@dataclass
class _Part:
    size: float = 0
    length: float = 0
    """Of the longest text."""
    is_wide: bool = False
    """Whether it must hold a place where several characters may stand."""
    varies: bool = False
    """Whether it has several lengths."""


@dataclass
class _Group:
    """One that is open, or the whole expression."""

    last: _Part = field(default_factory=_Part)
    before: _Part = field(default_factory=_Part)
    """The parts before it in this alternative together."""
    others: _Part = field(default_factory=lambda: _Part(is_wide=True))
    """The alternatives before this one."""
    is_ambiguous: bool = False

    def add(self, part: _Part) -> None:
        last, before = self.last, self.before
        if self.is_ambiguous and not last.is_wide:
            last.size += last.length * _AMBIGUITY
        self.is_ambiguous = not last.is_wide and (last.varies or self.is_ambiguous)
        before.size += last.size
        before.length += last.length
        before.is_wide |= last.is_wide
        before.varies |= last.varies
        self.last = part

    def end_alternative(self) -> None:
        self.add(_Part())
        before, others = self.before, self.others
        others.size += before.size
        others.length = max(others.length, before.length)
        others.is_wide &= before.is_wide
        others.varies |= before.varies
        self.before, self.is_ambiguous = _Part(), False


class Sizes:
    """Adds up sizes, while groups, alternatives and repetitions are read from left to right."""

    def __init__(self) -> None:
        self._groups = [_Group()]

    def part(self, size: float = 1, *, is_wide: bool = False, varies: bool = False) -> None:
        self._groups[-1].add(_Part(size, size, is_wide, varies))

    def alternative(self) -> None:
        group = self._groups[-1]
        group.end_alternative()
        group.others.varies = True

    def repeat(self, most: float, *, least: float) -> None:
        """The last part stands there so many times."""
        part = self._groups[-1].last
        part.size *= max(most, 1)
        part.length *= max(most, 1)
        if most > 1 and part.varies and not part.is_wide:
            part.size += part.length * _AMBIGUITY
        part.varies |= least != most
        part.is_wide &= least > 0

    def open(self) -> None:
        self._groups.append(_Group())

    def close(self) -> None:
        if len(self._groups) > 1:
            group = self._groups.pop()
            group.end_alternative()
            part = group.others
            part.size, part.length = max(part.size, 1), max(part.length, 1)
            self._groups[-1].add(part)

    def total(self) -> float:
        while len(self._groups) > 1:
            self.close()
        self._groups[0].end_alternative()
        return self._groups[0].others.size


def times(number: str) -> float:
    """A number of a repetition; one of many digits is as good as endless."""
    return float(number) if len(number) <= _MAX_DIGITS else 10.0**_MAX_DIGITS


def size(expression: str, flags: str = "") -> float:
    """How many characters and classes a regular expression has once its repetitions are written
    out; more where that cannot be told. One pass reads it as the engine does."""
    if "{" in expression and ("x" in flags or _SAYS_VERBOSE.search(expression)):
        return math.inf  # blanks and comments may stand within everything
    sizes = Sizes()
    at = 0
    while at < len(expression):
        sign = expression[at]
        if sign == "[":
            sizes.part(is_wide=_WIDE_CLASS.match(expression, at) is not None)
            at = _end_of_class(expression, at)
        elif sign == "\\" and (escape := _ESCAPE.match(expression, at)):
            at = escape.end()
            sizes.part(is_wide=escape[0] in _WIDE_ESCAPES)
        elif sign == "{" and (found := _REPETITION.match(expression, at)):
            at = found.end()
            least = times(found[1])
            most = times(found[3]) if found[3] else least + 1 if found[2] else least
            sizes.repeat(max(most, least), least=least)
        else:
            at += 1
            match sign:
                case "(":
                    sizes.open()
                case ")":
                    sizes.close()
                case "|":
                    sizes.alternative()
                case "*" | "?":
                    sizes.repeat(1, least=0)
                case "+":
                    sizes.repeat(2, least=1)
                case _:
                    sizes.part(is_wide=sign == ".")
    return sizes.total()


def _end_of_class(expression: str, at: int) -> int:
    """Where a class ends that begins at `at`; classes may stand in one another."""
    depth = 0
    while at < len(expression):
        if begins := _CLASS_BEGINS.match(expression, at):
            at = begins.end()
            depth += 1
        elif expression[at] == "]":
            at += 1
            depth -= 1
            if depth == 0:
                break
        else:
            member = _MEMBER.match(expression, at)
            assert member is not None, "any character is one"
            at = member.end()
    return at


# --- the size of a grammar in Lark ---------------------------------------------------------

_LARK_TOKEN = re.compile(
    r"""(?P<blank> [ \t]++ | (?: \# | // ) [^\n]*+ )
    | (?P<line_end> (?: \r? \n )++ )
    | (?P<text> " (?: \\. | [^"\\\n] )*+ " i? )
    | / (?P<expression> (?: \\. | [^/\\] )++ ) / (?P<flags> [imslux]*+ )
    | (?P<special> < [^<>\s]++ > )
    | (?P<terminal> _?[A-Z] [_A-Z0-9-]*+ )
    | (?P<rule> !?[_?]?[a-z] [_a-z0-9-]*+ )
    | [{~] (?P<repetition> (?: [ \t,.]++ | [+-]?[0-9]++ )*+ )
    | (?P<number> [+-]?[0-9]++ )
    | (?P<sign> [^\n] | \n )
    """,
    re.VERBOSE,
)
_SIZE_OF_OTHERS = 50
"""Of a terminal that is imported."""
_MAX_GRAMMAR_SIZE = 5 * MAX_SIZE

_Tokens = Sequence[re.Match[str]]


class LarkSizes:
    """The sizes of a grammar's definitions. The engine writes out each terminal where another one
    names it, so that repetitions multiply from one to the next."""

    def __init__(self, text: str) -> None:
        self._definitions: dict[str, list[_Tokens]] = defaultdict(list)
        self._sizes: dict[str, float] = {}
        tokens: list[re.Match[str]] = []
        is_new = True
        for token in _LARK_TOKEN.finditer(text):
            match token.lastgroup:
                case "blank":
                    continue
                case "line_end":
                    is_new = True
                    continue
            if is_new and token[0] != "|":
                tokens = []
                self._definitions[token[0]].append(tokens)
            else:
                tokens.append(token)
            is_new = False

    def are_small(self) -> bool:
        """Finds the size of each definition after those of the terminals that it names, of which a
        chain may be longer than Python's stack."""
        due, begun = [*reversed(self._definitions)], set[str]()
        while due:
            name = due[-1]
            named = () if name in begun else self._terminals(name)
            begun.add(name)
            if missing := [each for each in named if each not in self._sizes]:
                due += missing
                continue
            due.pop()
            if name not in self._sizes:
                is_terminal = name.lstrip("_")[:1].isupper()
                found = (self._size(each, is_terminal) for each in self._definitions[name])
                self._sizes[name] = sum(found)
        sizes = self._sizes.values()
        return max(sizes, default=0) <= MAX_SIZE and sum(sizes) <= _MAX_GRAMMAR_SIZE

    def _terminals(self, name: str) -> Iterator[str]:
        """Those that a definition names and that are defined."""
        for token in chain.from_iterable(self._definitions[name]):
            if token.lastgroup == "terminal" and token[0] in self._definitions:
                yield token[0]

    def _size(self, tokens: _Tokens, is_terminal: bool) -> float:
        sizes = Sizes()
        for token in tokens:
            match token.lastgroup:
                case "text":
                    sizes.part(len(token[0]))
                case "flags":
                    written_out = size(token["expression"], token["flags"])
                    sizes.part(written_out, varies=is_terminal)
                case "terminal":
                    # One without a size names itself: the engine refuses it.
                    others = 1 if token[0] in self._definitions else _SIZE_OF_OTHERS
                    sizes.part(self._sizes.get(token[0], others), varies=is_terminal)
                case "rule" | "special":
                    sizes.part()
                case "sign" if token[0] in "([":
                    sizes.open()
                case "sign" if token[0] in ")]":
                    sizes.close()
                case "sign" if token[0] == "|" and is_terminal:
                    sizes.alternative()
                case "sign" if token[0] in "*?" and is_terminal:
                    sizes.repeat(1, least=0)
                case "sign" if token[0] == "+":
                    sizes.repeat(2, least=1 if is_terminal else 2)
                case "repetition":
                    if most := _most(token["repetition"]):
                        sizes.repeat(most, least=0 if is_terminal else most)
        return sizes.total()


def _most(numbers: str) -> float:
    """How often the numbers behind { or ~ repeat what stands before them; without any, 0."""
    is_open = numbers.rstrip().endswith(",")
    return max(map(times, re.findall("[0-9]+", numbers)), default=0) + is_open
