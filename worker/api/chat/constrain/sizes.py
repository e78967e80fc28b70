"""The sizes of regular expressions and grammars once their repetitions are written out, which the
engine does before its own limits apply. Pure functions, any thread."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

MAX_SIZE = 20_000
"""The most characters and classes of an expression. So many take the engine some 20 ms."""
_TOKEN = re.compile(
    r"""\{ (?P<numbers> \s*+ (?P<least> [0-9]++ ) \s*+ (?: , \s*+ (?: [0-9]++ \s*+ )?+ )?+ ) \}
    | (?P<class> \[ )
    | (?P<sign> [()|*?+] )
    | (?P<character> \\ (?: [xuUpP] \{[^{}]*+\} | . ) | . )
    """,
    re.VERBOSE | re.DOTALL,
)
_CLASS_BEGINS = re.compile(r"\[\^?(?:-++|\]?)")
_MEMBER = re.compile(r"&&|--|~~|(?:\\.|.)(?:-(?![\]-])(?:\\.|.))?+", re.DOTALL)
"""In a class: an operator between two classes, a character or a range."""
SAYS_VERBOSE = re.compile(r"\(\?[A-Za-wyz-]*+x")
_WIDE_CLASS = re.compile(r"\[(?:a-z|A-Z|0-9|\\[wds])(?:[^\\\[\]&~-]|-(?!-)|\\.)*+\]", re.DOTALL)
"""A class that certainly holds more than one character."""
_WIDE = frozenset((".", r"\w", r"\W", r"\d", r"\D", r"\s", r"\S"))
_MAX_DIGITS = 9
_AMBIGUITY = 18
"""How much a character counts after a part of variable length. When it must come next, the engine
takes time in proportion to all that may follow."""


@dataclass
class _Part:
    size: float = 0
    length: float = 0
    """The length of the longest text that it matches."""
    is_wide: bool = False
    """Whether every text that it matches goes through a class of several characters."""
    varies: bool = False
    """Whether its texts may differ in length."""


@dataclass
class _Group:
    """A group that is open, or the whole expression."""

    last: _Part = field(default_factory=_Part)
    before: _Part = field(default_factory=_Part)
    """The parts before it in this alternative, combined."""
    others: _Part = field(default_factory=lambda: _Part(is_wide=True))
    """The alternatives before this one, combined."""
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
    """Adds up sizes while groups, alternatives and repetitions are read from left to right."""

    def __init__(self, *, may_vary: bool = True) -> None:
        """`may_vary`: whether a part's length decides where the next one begins. It does not in a
        grammar's rule, as the text is first split into terminals."""
        self._may_vary = may_vary
        self._groups = [_Group()]

    def part(self, size: float = 1, *, is_wide: bool = False, varies: bool = False) -> None:
        self._groups[-1].add(_Part(size, size, is_wide, varies and self._may_vary))

    def sign(self, sign: str) -> None:
        """Read a sign that regular expressions and Lark share, or Lark's `[ ]`, a group."""
        match sign:
            case "(" | "[":
                self._groups.append(_Group())
            case ")" | "]":
                self._close()
            case "|":
                group = self._groups[-1]
                group.end_alternative()
                group.others.varies = self._may_vary
            case "*" | "?":
                self.repeat(1, least=0)
            case "+":
                self.repeat(2, least=1)

    def repeat(self, most: float, *, least: float) -> None:
        """Repeat the last part `least` to `most` times."""
        part = self._groups[-1].last
        part.size *= max(most, 1)
        part.length *= max(most, 1)
        if most > 1 and part.varies and not part.is_wide:
            part.size += part.length * _AMBIGUITY
        part.varies |= self._may_vary and least != most
        part.is_wide &= least > 0

    def _close(self) -> None:
        if len(self._groups) > 1:
            group = self._groups.pop()
            group.end_alternative()
            part = group.others
            part.size, part.length = max(part.size, 1), max(part.length, 1)
            self._groups[-1].add(part)

    def total(self) -> float:
        while len(self._groups) > 1:
            self._close()
        self._groups[0].end_alternative()
        return self._groups[0].others.size


def size(expression: str, flags: str = "") -> float:
    """How many characters and classes a regular expression has once its repetitions are written
    out. Ambiguous ones count more; if the size cannot be known, it is infinite."""
    if "{" in expression and ("x" in flags or SAYS_VERBOSE.search(expression)):
        return math.inf  # white space and comments may be anywhere
    sizes = Sizes()
    at = 0
    while token := _TOKEN.match(expression, at):
        at = token.end()
        match token.lastgroup:
            case "numbers":
                sizes.repeat(_most(token["numbers"]), least=_number(token["least"]))
            case "class":
                sizes.part(is_wide=_WIDE_CLASS.match(expression, token.start()) is not None)
                at = _end_of_class(expression, token.start())
            case "sign":
                sizes.sign(token[0])
            case _:
                sizes.part(is_wide=token[0] in _WIDE)
    return sizes.total()


def _most(numbers: str) -> float:
    """The most repetitions that `numbers` allow, an open end as one more; 0 if there are none."""
    is_open = numbers.rstrip().endswith(",")
    return max(map(_number, re.findall("[0-9]+", numbers)), default=0) + is_open


def _number(digits: str) -> float:
    """The number, or a limit in place of a larger one."""
    return float(digits) if len(digits) <= _MAX_DIGITS else 10.0**_MAX_DIGITS


def _end_of_class(expression: str, at: int) -> int:
    """Where the class that begins at `at` ends; classes may be nested."""
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
"""The size of an imported terminal."""
_MAX_GRAMMAR_SIZE = 5 * MAX_SIZE

Tokens = Sequence[re.Match[str]]


def definitions_of(text: str) -> Iterator[Tokens]:
    """The tokens of each definition and directive of a grammar in Lark."""
    tokens: list[re.Match[str]] = []
    is_new = True
    for token in _LARK_TOKEN.finditer(text):
        match token.lastgroup:
            case "blank":
                continue
            case "line_end":
                is_new = True
                continue
        if is_new and token[0] != "|" and tokens:
            yield tokens
            tokens = []
        tokens.append(token)
        is_new = False
    if tokens:
        yield tokens


class LarkSizes:
    """The sizes of a grammar's definitions. The engine writes out each terminal wherever another
    one names it, so repetitions multiply from one to the next."""

    def __init__(self, text: str) -> None:
        self._definitions: dict[str, list[Tokens]] = defaultdict(list)
        self._sizes: dict[str, float] = {}
        for first, *rest in definitions_of(text):
            self._definitions[first[0]].append(rest)

    def are_small(self) -> bool:
        """Whether each definition, and all of them together, are within the limits."""
        # Without recursion: a chain of terminals may be longer than Python's stack.
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
        """The terminals that a definition names and the grammar defines."""
        for token in chain.from_iterable(self._definitions[name]):
            if token.lastgroup == "terminal" and token[0] in self._definitions:
                yield token[0]

    def _size(self, tokens: Tokens, is_terminal: bool) -> float:
        sizes = Sizes(may_vary=is_terminal)
        for token in tokens:
            match token.lastgroup:
                case "text":
                    sizes.part(len(token[0]))
                case "flags":
                    sizes.part(size(token["expression"], token["flags"]), varies=True)
                case "terminal":
                    # One without a size is recursive: the engine refuses it.
                    others = 1 if token[0] in self._definitions else _SIZE_OF_OTHERS
                    sizes.part(self._sizes.get(token[0], others), varies=True)
                case "rule" | "special":
                    sizes.part()
                case "sign":
                    sizes.sign(token[0])
                case "repetition":
                    if most := _most(token["repetition"]):
                        sizes.repeat(most, least=0)
        return sizes.total()
