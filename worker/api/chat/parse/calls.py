"""The calls of one answer while they are read, and what their readers share. Any thread."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from worker.api.chat.delta import Arguments, Call, Delta, Parser

Progress = Literal["more", "done", "failed"]
"""The state of a reader: it needs more text, the call has ended, or this is no call."""

MAX_HEADER_CHARS = 400
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request may call functions."""

    forced: str | None
    """The function that must be called; `"*"` for any of them, `None` for no obligation."""
    parallel: bool
    parameters: Mapping[str, Any]
    """The schema of each function's parameters, by the function's name."""

    @classmethod
    def of(
        cls, tools: Sequence[Mapping[str, Any]], forced: str | None = None, *, parallel: bool = True
    ) -> ToolUse:
        """The use of `tools`, which are in OpenAI's form."""
        functions = [tool["function"] for tool in tools]
        parameters = {function["name"]: function.get("parameters") for function in functions}
        return cls(forced, parallel, parameters)


class Calls:
    """Numbers, names and emits calls. Without parallel calls, all but the first are dropped."""

    def __init__(self, use: ToolUse, id_length: int | None = None) -> None:
        self._use, self._id_length = use, id_length
        self.deltas: list[Delta] = []
        self.count = 0

    def is_offered(self, name: str) -> bool:
        return name in self._use.parameters

    def may_be_offered(self, begun: str) -> bool:
        """Whether `begun` is the beginning of an offered function's name, or begins with one."""
        names = self._use.parameters
        return any(name.startswith(begun) or begun.startswith(name) for name in names)

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's parameters by name."""
        schema = self._use.parameters.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}

    def start(self, name: str, call_id: str | None = None) -> None:
        self.count += 1
        if self._is_wanted:
            self.deltas.append(Call(self.count - 1, call_id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        if text and self._is_wanted:
            self.deltas.append(Arguments(self.count - 1, text))

    @property
    def _is_wanted(self) -> bool:
        return self._use.parallel or self.count == 1

    def _new_id(self) -> str:
        if self._id_length is not None:
            return "".join(secrets.choice(_LETTERS) for _ in range(self._id_length))
        return f"call_{uuid.uuid4().hex[:24]}"


class PartsParser(Parser):
    """What the parsers of dialects that mark every part of an answer have in common."""

    def __init__(self, use: ToolUse) -> None:
        self._calls = Calls(use)
        self._held = ""
        """Output that is not understood yet."""

    def run(self, text: str, *, final: bool) -> list[Delta]:
        self._held += text
        while self._held and self._step(final):
            pass
        if final:
            self._end_part()
        deltas, self._calls.deltas = self._calls.deltas, []
        return deltas

    @abstractmethod
    def _step(self, final: bool) -> bool:
        """Read some of what is held; false where more output is needed."""

    def _end_part(self) -> None:
        """Emit what is only known at the end of a part."""


def header_of(
    held: str, pattern: re.Pattern[str], calls: Calls, *, final: bool
) -> re.Match[str] | Literal["more", "failed"]:
    """The header that `held` begins with, if it names an offered function."""
    found = pattern.match(held)
    if found is None:
        return "failed" if final or len(held) > MAX_HEADER_CHARS else "more"
    return found if calls.is_offered(found["name"].strip()) else "failed"


def begun_mark(text: str, marks: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that is an incomplete one of `marks`."""
    if _first_characters(marks).search(text) is None:  # the usual case
        return 0
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


def certain_part(text: str, marks: tuple[str, ...], final: bool) -> tuple[str, str]:
    """The text without an incomplete mark at its end, and that mark; `final`: there is none."""
    n_kept = 0 if final else begun_mark(text, marks)
    return text[: len(text) - n_kept], text[len(text) - n_kept :]


@lru_cache(maxsize=256)
def _first_characters(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark[0]) for mark in marks) or r"(?!)")
