"""How a request may call functions, and the deltas of an answer while it is read. Any thread."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.parse.json_values import read_input
from worker.api.chat.parse.source import Grow, Source

_LETTERS = string.ascii_letters + string.digits
_INDEX = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True)
class ToolUse:
    forced: bool
    """Whether a function must be called."""
    parallel: bool
    parameters: Mapping[str, Any]
    """The schema of each function's parameters, by the function's name."""
    texts: frozenset[str] = frozenset()
    """The custom tools among them."""
    is_json: bool = False
    """Whether a call is bare JSON, whatever the model's convention: a form holds for the answer."""

    def offered(self, written: str) -> str | None:
        """The function that a model means: it may write `functions.NAME` and `NAME:0`."""
        plain = written.removeprefix("functions.")
        names = (written, plain, _INDEX.sub("", plain))
        return next((name for name in names if name in self.parameters), None)

    def properties(self, name: str) -> Mapping[str, Any]:
        """The schemas of a function's parameters by name."""
        schema = self.parameters.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}


NO_TOOLS = ToolUse(False, True, {})


class _Input:
    """Reads a custom tool's text in a call's arguments while they come."""

    def __init__(self) -> None:
        self._source, self._parts = Source(), list[str]()
        self._steps = read_input(self._source, self._parts.append)

    def more(self, arguments: str) -> str:
        """The text that so many arguments more add."""
        self._source.add(arguments, final=False)
        next(self._steps)
        text = "".join(self._parts)
        self._parts.clear()
        return text


@dataclass(slots=True)
class Deltas:
    """The deltas that have not been given on. Without parallel calls, only the first call is."""

    use: ToolUse
    id_length: int | None
    n_unwritten: int
    """So many characters of the next text are the prompt's end, and not the model's."""
    n_calls: int = 0
    _deltas: list[Delta] = field(default_factory=list)
    _of: Grow | None = None
    """Makes the delta of the texts in `_parts`."""
    _parts: list[str] = field(default_factory=list)
    is_in_call: bool = False
    """Whether arguments of the last call are still to come, and are given on."""
    _ids: set[str] = field(default_factory=set)
    _input: _Input | None = None
    """Of the last call, if it is of a custom tool."""

    @property
    def grow_text(self) -> Grow | None:
        """Makes the delta of more text; `None` where there is none."""
        return None if self.use.forced else Text

    def take(self) -> list[Delta]:
        self._join()
        deltas, self._deltas = self._deltas, []
        return deltas

    def text(self, text: str) -> None:
        if not self.use.forced:
            self._add(Text, text[self.n_unwritten :])
        self.n_unwritten = max(self.n_unwritten - len(text), 0)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def call(self, name: str, call_id: str | None = None) -> None:
        self._join()
        self.n_unwritten = 0
        self.n_calls += 1
        if call_id is None or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._input = _Input() if name in self.use.texts else None
        if self._is_wanted:
            self.is_in_call = True
            is_custom = self._input is not None
            self._deltas.append(Call(self.n_calls - 1, call_id, name, is_custom))

    def whole_call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        self.call(name, call_id)
        self.end_call(arguments)

    def end_call(self, text: str = "") -> None:
        """With the last of its arguments."""
        self.arguments(text)
        self.is_in_call = False

    def arguments(self, text: str) -> None:
        if self._is_wanted:
            self._add(self._arguments, text)

    @property
    def grow(self) -> Grow | None:
        """Makes the delta of more arguments; `None` if they are not given on."""
        return self._arguments if self._is_wanted else None

    def _arguments(self, text: str) -> Delta:
        return Arguments(self.n_calls - 1, self._input.more(text) if self._input else text)

    def _add(self, of: Grow, text: str) -> None:
        if text:
            if self._of != of:
                self._join()
            self._of = of
            self._parts.append(text)

    def _join(self) -> None:
        if self._of is not None:
            self._deltas.append(self._of("".join(self._parts)))
        self._of, self._parts = None, []

    @property
    def _is_wanted(self) -> bool:
        return self.use.parallel or self.n_calls == 1

    def _new_id(self) -> str:
        if self.id_length is not None:
            return "".join(secrets.choice(_LETTERS) for _ in range(self.id_length))
        return f"call_{uuid.uuid4().hex[:24]}"
