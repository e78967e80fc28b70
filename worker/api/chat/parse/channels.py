"""Reads gpt-oss's output: messages in channels for reasoning, the answer or calls.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}`. Never raises, whatever the text. One per choice, any thread.
"""

from __future__ import annotations

import re

from worker.api.chat.delta import Reasoning, Text
from worker.api.chat.parse.calls import PartsParser, ToolUse, begun_mark, certain_part

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_HEADER_BEGINS = ("<|channel|>", "<|start|>", " to=", "to=")
_MAX_HEADER_CHARS = 400


class ChannelParser(PartsParser):
    def __init__(self, use: ToolUse, *, splits_reasoning: bool) -> None:
        super().__init__(use)
        self._splits_reasoning = splits_reasoning
        self._state: str = "begin"
        """`begin` of the output, `header` of a message, or in one `text`, `reasoning` or `call`."""

    def _step(self, final: bool) -> bool:
        if self._state == "begin":
            return self._begin(final)
        if self._state == "header":
            return self._header(final)
        return self._body(final)

    def _begin(self, final: bool) -> bool:
        """Decide whether a header begins the output: a constrained or prefilled answer has none."""
        if self._held.startswith(_HEADER_BEGINS):
            self._state = "header"
        elif not final and begun_mark(self._held, _HEADER_BEGINS) == len(self._held):
            return False
        else:
            self._state = "text"
        return True

    def _header(self, final: bool) -> bool:
        header, found, behind = self._held.partition(_MESSAGE)
        if not found:
            if len(header) > _MAX_HEADER_CHARS:
                self._state = "text"
                return True
            if final:
                self._held = ""
            return False
        self._held = behind
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition("<|channel|>")[2]
        if recipient and self._calls.is_offered(recipient[1]):
            self._state = "call"
            self._calls.start(recipient[1])
        elif channel.startswith("analysis") and self._splits_reasoning:
            self._state = "reasoning"
        else:
            self._state = "text"
        return True

    def _body(self, final: bool) -> bool:
        places = [(place, end) for end in _ENDS if (place := self._held.find(end)) >= 0]
        if not places:
            text, self._held = certain_part(self._held, _ENDS, final)
            self._send(text)
            return False
        place, end = min(places)
        self._send(self._held[:place])
        self._held = self._held[place:]
        if end not in ("<|channel|>", "<|start|>"):
            self._held = self._held[len(end) :]
        self._state = "header"
        return True

    def _send(self, text: str) -> None:
        if not text:
            return
        if self._state == "call":
            self._calls.arguments(text)
        else:
            kind = Reasoning if self._state == "reasoning" else Text
            self._calls.deltas.append(kind(text))
