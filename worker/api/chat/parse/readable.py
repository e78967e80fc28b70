"""Keeps a call's arguments readable for formats in which they are an object. Any thread.

A model may make mistakes in the structure of its JSON, which `json_values` leaves in place. Who
reads a stream has the text before the mistake by then. So that text is completed: its open brackets
are closed, and one more member, `INPUT`, has all that the model wrote.
"""

from __future__ import annotations

import re

from worker.api.chat.parse.json_values import to_json
from worker.api.chat.request import INPUT

_PART = re.compile(r'[ \t\r\n]++|[{}\[\],:"]|[^ \t\r\n{}\[\],:"]++')
_CLOSING = {"{": "}", "[": "]"}
_STRING = re.compile(r'(?:[^"\\]|\\(?:.|\Z))*+("?)', re.DOTALL)
"""The rest of a string, or as much of it as there is."""


class Readable:
    """Takes arguments in parts of whole tokens, strings excepted, and returns what can be read.

    Keys and separators are held back until a value follows, so that the text can be completed.
    """

    def __init__(self) -> None:
        self._closing: list[str] = []
        """The brackets that end what is open."""
        self._next = "value"
        """What must follow: `value`, `key`, `:` or `,`; empty after a mistake."""
        self._may_close = False
        self._string = ""
        """Whether a string is open: it is a `value` or a `key`."""
        self._held, self._parts = "", list[str]()
        self._has_members = False

    def take(self, text: str) -> str:
        self._parts.append(text)
        sent, at = list[str](), 0
        while at < len(text) and self._next:
            found = (_STRING if self._string else _PART).match(text, at)
            assert found is not None, "any text begins with one of them"
            at = found.end()
            is_value = self._string == "value" or (not self._string and self._begins(found[0]))
            if not self._next:
                break
            if self._string and found.lastindex and found[1]:
                self._may_close, self._next = is_value, "," if is_value else ":"
                self._string = ""
            self._held += found[0]
            if is_value:
                sent.append(self._held)
                self._held = ""
        return "".join(sent)

    def finish(self) -> str:
        """The rest: what was held back, or what completes the text after a mistake."""
        if self._next:
            return self._held
        if self._may_close and not self._closing:
            return ""  # the mistake is behind the object
        begin = "".join(self._closing[:0:-1]) if self._closing else "{"
        comma = ", " * self._has_members
        return f'{begin}{comma}"{INPUT}": {to_json("".join(self._parts))}}}'

    def _begins(self, part: str) -> bool:
        """Read a part outside of strings; returns whether it begins or ends a value."""
        closing, due = self._closing, self._next
        if part.isspace():
            return False
        if self._may_close and closing[-1:] == [part]:
            closing.pop()
            self._next = ","
            return True
        if due == "value" and (closing or part == "{") and part not in ("}", "]", ",", ":"):
            self._has_members |= len(closing) == 1
            if part in _CLOSING:
                closing.append(_CLOSING[part])
                self._next = "key" if part == "{" else "value"
            elif part == '"':
                self._string = due
            else:
                self._next = ","
            self._may_close = True
            return True
        if part == due and closing:
            self._may_close = False
            self._next = "key" if part == "," and closing[-1] == "}" else "value"
        elif part == '"' and due == "key":
            self._string = due
        else:
            self._next = ""
        return False
