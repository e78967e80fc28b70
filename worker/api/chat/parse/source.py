"""The model's text while it is parsed: a position in it, and only as much of it as is undecided.

A parser is written as if the whole text were there. When it needs more text than has arrived, it
yields, and continues when there is more: most methods of `Source` and all readers of calls are such
generators. The time is linear in the text, however it is split into pieces. Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, TypeVar

from worker.api.chat.delta import Delta

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields when it needs more text, and returns a `T`."""
Give = Callable[[str], None]
"""Receives the next part of a text."""
Grow = Callable[[str], Delta]
"""Makes the delta of the next part of a text."""
Fit = tuple[dict[str, str], int] | Literal["more"] | None

MAX_FIELD_CHARS = 400
_MAX_ANY_CHARS = 100
BLANK: Final = re.compile(r"\s*")
_FIELDS: Final = {
    "name": re.compile(r"[^\s<>{}()\[\]\"']+"),
    "id": re.compile(r"[\w.:/-]+"),
    "key": re.compile(r"(?!/)[^<>\"\n]+"),
    "type": re.compile(r"\w+"),
}


class Marks:
    """Texts to look for; if several begin at one place, the longest one counts."""

    def __init__(self, *texts: str) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._longest = len(self.texts[0]) if self.texts else 0
        self._first = {text[0] for text in self.texts}
        first = "".join(map(re.escape, sorted(self._first)))
        self.plain = re.compile(f"[^{first}]+" if first else r"[\s\S]+")
        """Characters that begin no mark."""

    def begun(self, text: str, at: int) -> int:
        """The index of the longest suffix that may become a longer mark, or of the text's end."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first and self.may_become(text, start):
                return start
        return len(text)

    def may_become(self, text: str, at: int) -> bool:
        """Whether the text from `at` on is a prefix of a longer mark."""
        n_chars = len(text) - at
        if n_chars >= self._longest:
            return False
        begun = text[at:]
        return any(len(mark) > n_chars and mark.startswith(begun) for mark in self.texts)


@lru_cache(maxsize=512)
def marks_of(*texts: str) -> Marks:
    """Cached, as all answers of a model look for the same marks."""
    return Marks(*texts)


class Header:
    """A pattern for the text before a call's or an argument's content.

    `{name}`, `{id}`, `{key}` and `{type}` are fields, `{any}` is at most 100 characters up to the
    next text, `~` is optional white space. All else is literal.
    """

    def __init__(self, pattern: str) -> None:
        self.parts = [part for part in re.split(r"(\{\w+\}|~)", pattern) if part]

    @property
    def texts(self) -> list[str]:
        return [part for part in self.parts if part != "~" and not _is_field(part)]

    def fit(self, text: str, at: int) -> Fit:
        """The fields and the index after the header, if it is at `at`; "more" while undecided."""
        fields = dict[str, str]()
        for number, part in enumerate(self.parts):
            if part == "~":
                at = end_of(BLANK, text, at)
            elif part == "{any}":
                last = at + _MAX_ANY_CHARS
                at = text.find(self.parts[number + 1], at, last)
                if at < 0:
                    return "more" if len(text) < last else None
            elif _is_field(part):
                found = _FIELDS[part[1:-1]].match(text, at)
                end = found.end() if found else at
                if end == len(text) and end - at <= MAX_FIELD_CHARS:
                    return "more"
                if found is None or end - at > MAX_FIELD_CHARS:
                    return None
                fields[part[1:-1]], at = found[0], end
            elif text.startswith(part, at):
                at += len(part)
            else:
                return "more" if part.startswith(text[at : at + len(part)]) else None
        return fields, at


def _is_field(part: str) -> bool:
    return part[0] == "{" and part[-1] == "}"


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found is not None else at


def ignore(text: str) -> None:
    """Take no notice of a text that has no meaning, or that its source remembers."""


@dataclass(slots=True)
class Source:
    text: str = ""
    at: int = 0
    ended: bool = False
    is_cut: bool = False
    """Whether a limit or a stop ended the text."""
    _taken: list[str] | None = None
    flow: tuple[re.Pattern[str], Grow] | None = None
    """Set while no text is pending: text that needs no parsing, and what makes its delta."""

    def add(self, text: str, *, final: bool) -> None:
        self.text, self.at, self.ended = self.text[self.at :] + text, 0, final

    def remember(self) -> None:
        """Keep what is taken from here on, until `forget`."""
        self._taken = []

    @property
    def taken(self) -> str:
        """What was taken since `remember`."""
        return "".join(self._taken or ())

    def forget(self) -> str:
        taken, self._taken = self.taken, None
        return taken

    def take_to(self, end: int) -> str:
        """Take the text before the index `end`."""
        text, self.at = self.text[self.at : end], end
        if self._taken is not None:
            self._taken.append(text)
        return text

    def take(self, text: str) -> str:
        """Take `text`, which is here."""
        return self.take_to(self.at + len(text))

    def more(self) -> Steps[bool]:
        """Wait for more text; false if the text has ended."""
        if self.ended:
            return False
        yield
        return True

    def peek(self, n_chars: int = 1) -> Steps[str]:
        """The next characters, not taken; fewer at the end of the text."""
        while len(self.text) - self.at < n_chars and (yield from self.more()):
            pass
        return self.text[self.at : self.at + n_chars]

    def run_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take as much as matches `pattern`, a repeated class of characters."""
        parts: list[str] = []
        while True:
            parts.append(self.take_to(end_of(pattern, self.text, self.at)))
            if self.at < len(self.text) or not (yield from self.more()):
                return "".join(parts)

    def takes(self, char: str) -> Steps[bool]:
        """Take a character; false if it is not here."""
        if (yield from self.peek()) != char:
            return False
        self.take(char)
        return True

    def drop(self, text: str) -> Steps[None]:
        """Take the longest prefix of `text` that is here."""
        for char in text:
            if not (yield from self.takes(char)):
                return

    def drop_begun(self, marks: Marks, headers: Iterable[Header] = ()) -> None:
        """Take the rest of the text if it is the beginning of one of these, and was cut off."""
        text, at = self.text, self.at
        if self.is_cut and (
            marks.may_become(text, at) or any(each.fit(text, at) == "more" for each in headers)
        ):
            self.take_to(len(text))

    def until(
        self, marks: Marks, give: Give, grow: Grow | None = None, *, keeps_begun: bool = False
    ) -> Steps[str]:
        """Take the text before the next mark, and pass it to `give`. Returns the mark, not taken,
        or "" at the end.

        With `grow`, each part of the text that `give` receives is a delta. `keeps_begun`: what
        begins a mark is text, too, if a limit or a stop cut it off.
        """
        flow = (marks.plain, grow) if grow is not None else None
        while True:
            begun = len(self.text)
            if not self.ended:
                begun = marks.begun(self.text, self.at)
            elif self.is_cut and not keeps_begun:  # white space is no sign of a mark
                begun = end_of(BLANK, self.text, marks.begun(self.text, self.at))
            found = marks.pattern.search(self.text, self.at)
            if found is not None and found.start() < begun:
                if found.start() > self.at:
                    give(self.take_to(found.start()))
                return found[0]
            if begun > self.at:
                give(self.take_to(begun))
            self.flow = flow
            has_more = yield from self.more()
            self.flow = None
            if not has_more:
                self.take_to(len(self.text))
                return ""

    def here(self, marks: Marks) -> Steps[str]:
        """The mark that begins here, not taken; "" if none does."""
        while marks.may_become(self.text, self.at) and (yield from self.more()):
            pass
        found = marks.pattern.match(self.text, self.at)
        return found[0] if found is not None else ""

    def look(self, header: Header) -> Steps[Fit]:
        """`Header.fit` here, with nothing taken; "more" only if the text ends within the header."""
        while (found := header.fit(self.text, self.at)) == "more" and (yield from self.more()):
            pass
        return found

    def fit_one(self, headers: Iterable[Header]) -> Steps[tuple[int, dict[str, str]] | None]:
        """Take the first of the headers that is here; returns its index and its fields. If the text
        ends within one, those after it are not tried."""
        for index, header in enumerate(headers):
            found = yield from self.look(header)
            if found == "more":
                return None
            if found is not None:
                self.take_to(found[1])
                return index, found[0]
        return None
