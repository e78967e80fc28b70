"""Tool calls: which functions one is forced to, and the parser that finds calls in a text.

Models write calls in a few forms: `<tool_call>{…}</tool_call>`, `[TOOL_CALLS][{…}]`, or a bare
JSON object or list at the start of the output. Whatever looks like one but does not name an
offered function stays ordinary text. Pure functions and one small state machine per choice.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function_call>")
_MAX_MISSES = 32  # brackets that begin no JSON; a text of nothing else must not take long
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request may call functions."""

    names: frozenset[str]
    forced: str | None
    """The function that must be called, `"*"` for any of them, `None` for no must."""
    parallel: bool

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> ToolUse | None:
        """`None` when the request offers no tools."""
        if not tools:
            return None
        choice = body.get("tool_choice", "auto")
        named = choice["function"]["name"] if isinstance(choice, Mapping) else None
        return cls(
            names=frozenset(tool["function"]["name"] for tool in tools),
            forced=named or ("*" if choice == "required" else None),
            parallel=body.get("parallel_tool_calls", True),
        )


def forced_functions(
    tools: Sequence[Mapping[str, Any]], forced: str
) -> list[tuple[str, str, object]]:
    """Path, name and arguments' schema of the function `forced`, or of all of them (`"*"`)."""
    return [
        (f"tools[{index}].function.parameters", function["name"], function.get("parameters"))
        for index, function in enumerate(tool["function"] for tool in tools)
        if forced in ("*", function["name"])
    ]


class ToolCallParser:
    """Splits one choice's text into content, to be sent at once, and calls, at its end."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._held = ""
        self._in_call = use.forced is not None
        self._at_start = True

    def feed(self, text: str) -> str:
        """Take some output; gives back the part that certainly is content."""
        self._held += text
        if self._in_call:
            return ""
        if self._at_start:
            begun = self._held.lstrip()
            if not begun:
                return ""
            self._at_start = False
            if begun[0] in "{[" and not begun.startswith(_MARKERS):
                self._in_call = True
                return ""
        places = [place for marker in _MARKERS if (place := self._held.find(marker)) >= 0]
        if places:
            self._in_call = True
            cut = min(places)
        else:
            cut = len(self._held) - _open_suffix(self._held)
        content, self._held = self._held[:cut], self._held[cut:]
        return content

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content and the calls, in OpenAI's form."""
        calls = _calls_in(self._held, self._use) if self._in_call else []
        return ("" if calls else self._held), calls


def _open_suffix(text: str) -> int:
    """Length of the longest end of `text` that may yet become a marker."""
    longest = max(map(len, _MARKERS)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in _MARKERS):
            return length
    return 0


def _calls_in(text: str, use: ToolUse) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    place = misses = 0
    while misses < _MAX_MISSES and (place := _next_json(text, place)) >= 0:
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            place, misses = place + 1, misses + 1
            continue
        for item in value if isinstance(value, list) else [value]:
            call = _call(item, use)
            if call is not None:
                calls.append(call)
    return calls if use.parallel else calls[:1]


def _next_json(text: str, start: int) -> int:
    places = [place for sign in "{[" if (place := text.find(sign, start)) >= 0]
    return min(places, default=-1)


def _call(item: Any, use: ToolUse) -> dict[str, Any] | None:
    if not isinstance(item, dict) or item.get("name") not in use.names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": item["name"], "arguments": arguments},
    }
