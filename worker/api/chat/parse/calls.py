"""The functions that an answer may call, and its deltas while it is parsed. Any thread."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.parse.json_values import read_input
from worker.api.chat.parse.source import Grow, Source
from worker.api.chat.request import Tool

_LETTERS = string.ascii_letters + string.digits
_INDEX = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True)
class ToolUse:
    forced: bool
    """Whether a function must be called."""
    parallel: bool
    tools: Mapping[str, Tool]
    """By name."""
    is_json: bool = False
    """Whether a grammar makes a call bare JSON, whatever the model's convention."""

    def offered(self, written: str) -> str | None:
        """The offered function that a model means by `NAME`, `functions.NAME` or `NAME:0`."""
        plain = written.removeprefix("functions.")
        names = (written, plain, _INDEX.sub("", plain))
        return next((name for name in names if name in self.tools), None)

    def properties(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's parameters by name."""
        schema = self.tools[name].parameters
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}


NO_TOOLS = ToolUse(False, True, {})


def _input_reader() -> Callable[[str], str]:
    """A function that takes a custom tool's arguments part by part, and returns what each part adds
    to the tool's text."""
    source, parts = Source(), list[str]()
    steps = read_input(source, parts.append)

    def more(arguments: str) -> str:
        source.add(arguments, final=False)
        next(steps)
        text = "".join(parts)
        parts.clear()
        return text

    return more


@dataclass(slots=True)
class Deltas:
    """Collects deltas until they are taken. Without parallel calls, only the first call is kept."""

    use: ToolUse
    id_length: int | None
    n_prompt_chars: int
    """How many characters of the next text are the prompt's end, and not the model's."""
    n_calls: int = 0
    is_in_call: bool = False
    """Whether more arguments of the last call are to come and to be passed on."""
    _new: list[tuple[Grow, list[str]]] = field(default_factory=list)
    """For each delta, the function that makes it and the parts of its text."""
    _arguments: Grow = Text
    """Makes the delta of more arguments of the last call."""
    _ids: set[str] = field(default_factory=set)

    @property
    def grow_text(self) -> Grow | None:
        """Makes the delta of more text; `None` if the answer has no text."""
        return None if self.use.forced else Text

    def take(self) -> list[Delta]:
        new, self._new = self._new, []
        return [make("".join(parts)) for make, parts in new]

    def text(self, text: str) -> None:
        if not self.use.forced:
            self._add(Text, text[self.n_prompt_chars :])
        self.n_prompt_chars = max(self.n_prompt_chars - len(text), 0)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def call(self, name: str, call_id: str | None = None) -> None:
        self.n_prompt_chars = 0
        self.n_calls += 1
        if call_id is None or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        if self._is_wanted:
            self.is_in_call = True
            is_custom, index = self.use.tools[name].is_custom, self.n_calls - 1
            call = Call(index, call_id, name, is_custom)
            text_of = _input_reader() if is_custom else str
            self._new.append((lambda _: call, []))
            self._arguments = lambda text: Arguments(index, text_of(text))

    def whole_call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        self.call(name, call_id)
        self.end_call(arguments)

    def end_call(self, text: str = "") -> None:
        """End the last call, with the rest of its arguments."""
        self.arguments(text)
        self.is_in_call = False

    def arguments(self, text: str) -> None:
        if self._is_wanted:
            self._add(self._arguments, text)

    @property
    def grow(self) -> Grow | None:
        """Makes the delta of more arguments; `None` if the call is dropped."""
        return self._arguments if self._is_wanted else None

    def _add(self, make: Grow, text: str) -> None:
        if text:
            if not self._new or self._new[-1][0] is not make:
                self._new.append((make, []))
            self._new[-1][1].append(text)

    @property
    def _is_wanted(self) -> bool:
        return self.use.parallel or self.n_calls == 1

    def _new_id(self) -> str:
        if self.id_length is not None:
            return "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))
        return f"call_{uuid.uuid4().hex[:24]}"
