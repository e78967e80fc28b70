"""Reads functionary's output: parts with recipients, of which `all` is the user.

The prompt ends with `>>>`. The model continues with `all`, a line end and a text, or with a
function's name, a line end and its arguments. Then `>>>` and the next part may follow. Never
raises, whatever the text. One per choice, any thread.
"""

from __future__ import annotations

import json
import re

from worker.api.chat.delta import Text
from worker.api.chat.parse.calls import PartsParser, ToolUse
from worker.api.chat.parse.json_calls import JsonValue

MARK = ">>>"
USER = "all"
_BEGUN_MARK = re.compile(r">{1,3}\Z|>>>[^\n>]*\Z")


class RecipientParser(PartsParser):
    def __init__(self, use: ToolUse, prompt_end: str) -> None:
        super().__init__(use)
        self._recipients = {USER, *use.parameters}
        # A prefilled answer, or one whose prompt asks for no part, is text.
        self._at_header = prompt_end.endswith(MARK)
        self._recipient = USER
        self._said = ""
        """The whole part of a call so far."""
        self._n_sent = 0
        self._object: JsonValue | None = None
        """Finds the end of the call's arguments; text after them has no meaning."""

    def _step(self, final: bool) -> bool:
        if self._at_header:
            return self._header(final)
        place = self._next_part()
        if place is not None:
            self._send(self._held[:place])
            self._end_part()
            self._held, self._at_header = self._held[place + len(MARK) :], True
            return True
        begun = None if final else _BEGUN_MARK.search(self._held)
        cut = begun.start() if begun is not None and self._may_begin(begun[0]) else len(self._held)
        self._send(self._held[:cut])
        self._held = self._held[cut:]
        return False

    def _header(self, final: bool) -> bool:
        """Read the recipient up to the line end; a name of no offered function makes it text."""
        name, line_end, behind = self._held.partition("\n")
        if not line_end and not final and any(n.startswith(name) for n in self._recipients):
            return False
        self._at_header = False
        if name not in self._recipients or not line_end:
            self._recipient = USER
            return True
        self._held, self._recipient = behind, name
        if name != USER:
            self._calls.start(name)
            self._said, self._n_sent, self._object = "", 0, JsonValue(0)
        return True

    def _next_part(self) -> int | None:
        """The place of a mark that a recipient follows; Python's own prompt is not one."""
        for found in re.finditer(re.escape(MARK), self._held):
            name, line_end, _ = self._held[found.end() :].partition("\n")
            if line_end and name in self._recipients:
                return found.start()
        return None

    def _may_begin(self, text: str) -> bool:
        name = text.removeprefix(MARK) if text.startswith(MARK) else ""
        return any(each.startswith(name) for each in self._recipients)

    def _send(self, text: str) -> None:
        if self._recipient == USER:
            if text:
                self._calls.deltas.append(Text(text))
            return
        self._said = (self._said + text) if self._said else text.lstrip()
        if self._object is not None and self._said.startswith("{"):
            end = self._object.end(self._said)
            self._calls.arguments(self._said[self._n_sent : end])
            self._n_sent = len(self._said)
            if end is not None:
                self._object = None

    def _end_part(self) -> None:
        """End a call. Code instead of JSON is the value of the function's first parameter."""
        if self._recipient != USER and not self._n_sent:
            parameters, value = list(self._calls.parameters(self._recipient)), self._said.rstrip()
            call = {parameters[0]: value} if parameters and value else {}
            self._calls.arguments(json.dumps(call))
        self._recipient = USER
