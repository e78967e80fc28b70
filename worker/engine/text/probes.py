"""Finds out which forms a template reads, when it is loaded.

Each probe is a small chat with marks in it. It is rendered in one form after the other, until the
marks arrive in the prompt. Later, each chat is converted to the forms that were found. The probes
run during the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from worker.engine.text import forms
from worker.engine.text.forms import (
    Chat,
    Form,
    Message,
    assistant,
    developer,
    message_of,
    system,
    unchanged,
    user,
    without,
)

Render = Callable[[Chat], str | None]
"""Renders a chat; `None` if the template refuses it."""

_MARK = "mark5eb1"
_FIRST, _SECOND = "first5eb1", "second5eb1"
_CALLED = "called5eb1"
_UNKNOWN_ROLE = "role5eb1"
_ID = "call_0123456789abcdef0123456"
"""The id of a call without its last digit, in the format of this worker and most others."""


def calling(*keys: str, content: Any = "", **more: Any) -> Message:
    calls = [
        {"id": _ID + id, "type": "function", "function": {"name": "f", "arguments": {"key": key}}}
        for id, key in zip("12", keys, strict=False)
    ]
    return assistant(content, tool_calls=calls, **more)


def result(content: Any, id: str = "1") -> Message:
    return message_of("tool", content, tool_call_id=_ID + id)


def _without_id(message: Message) -> Message:
    return forms.with_calls(without(message, "tool_call_id"), lambda call: without(call, "id"))


def _tool(name: str = "f") -> dict[str, Any]:
    key = {"type": "string", "description": "A key"}
    parameters = {"type": "object", "properties": {"key": key}, "required": ["key"]}
    return _bare(name, description="A function", parameters=parameters)


def _bare(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def chat_of(*messages: Message, tools: Sequence[Any] = ()) -> Chat:
    """A chat. If it has calls or results, it also has a tool."""
    uses_tools = any({"tool_calls", "tool_call_id"} & message.keys() for message in messages)
    all_tools = tools or ([_tool()] if uses_tools else None)
    return {"messages": list(messages), "tools": all_tools, "add_generation_prompt": True}


Arrives = Callable[[str], bool]
"""Whether all that a probe says is in the prompt."""


def _in_their_order(probe: Chat, prompt: str) -> bool:
    """Whether the prompt has all marks of the probe, in this order, and not in a list of parts as
    Python or JSON prints it."""
    marks = [mark for mark in (_FIRST, _MARK, _SECOND) if mark in str(probe)]
    places = [prompt.find(mark) for mark in marks]
    printed = rf"""["'](text|thinking)["']: ?["']({"|".join(marks)})"""
    return places[0] >= 0 and places == sorted(places) and not re.search(printed, prompt)


def _all_arrive(prompt: str) -> bool:
    """Whether all marks are in the prompt; templates differ in the order of text and calls."""
    return all(mark in prompt for mark in (_FIRST, _MARK, _SECOND))


def _arrives_as_json(prompt: str) -> bool:
    """Whether the arguments are JSON: not an object as Python prints it, nor text quoted again."""
    printed = repr({"key": _MARK})
    return _MARK in prompt and printed not in prompt and f'\\"{_MARK}\\"' not in prompt


def _has_tools(prompt: str) -> bool:
    """Whether the prompt has the tools; if they are listed in words, it must have calls, too."""
    return _MARK in prompt and (forms.LISTED not in prompt or _CALLED in prompt)


@dataclass(frozen=True, slots=True)
class _Probe:
    """A chat that templates read in different forms."""

    chat: Chat
    forms: tuple[Form, ...]
    """Those to try. The last one is used if the marks arrive in none."""
    arrives: Arrives | None = None
    """`None`: `_in_their_order`."""
    role: str = ""
    """The first form has this role, and is skipped if the template does not know it."""


def _probe_of_parts(role: str, *messages: Message, is_calling: bool = False) -> _Probe:
    """Finds out if two parts of a message arrive: a template may read each role in its own way."""

    def selects(message: Message) -> bool:
        return message.get("role") == role and bool(message.get("tool_calls")) is is_calling

    return _Probe(chat_of(*messages), (unchanged, forms.as_text(selects), unchanged))


_TWO_PARTS = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]

_PROBES = (
    _Probe(chat_of(user(_MARK)), (unchanged, forms.without_none, unchanged)),
    _Probe(
        chat_of(user("x"), tools=[_bare(_FIRST), _bare(_SECOND, parameters={})]),
        (unchanged, forms.complete, unchanged),
    ),
    _Probe(
        chat_of(developer(_MARK), user("x")),
        (unchanged, forms.with_role("developer", "system")),
        role="developer",
    ),
    _Probe(
        chat_of(system(_FIRST), system(_MARK), developer(_SECOND), user("x")),
        (unchanged, partial(forms.merged_beginning, of_each_role=True), forms.merged_beginning),
    ),
    _Probe(
        chat_of(
            *(user("x"), calling("y"), result(_FIRST)),
            *(calling("s", "t"), *map(_without_id, (result("u"), result("v")))),
            *map(_without_id, (calling("w", "z"), result(_MARK), result(_SECOND))),
        ),
        (unchanged, forms.paired, forms.with_short_ids, unchanged),
    ),
    _Probe(
        chat_of(user("x"), calling(_MARK), result("y")),
        (forms.as_objects, forms.with_arguments(forms.written), forms.as_objects),
        _arrives_as_json,
    ),
    _Probe(
        chat_of(user("x"), calling(_CALLED), result("y"), tools=[_tool(_MARK)]),
        (unchanged, forms.as_functions, forms.listed, forms.in_words),
        _has_tools,
    ),
    _Probe(
        chat_of(user("x"), result(_MARK), assistant("y"), user("z")),
        (unchanged, forms.strays_as_user, unchanged),
    ),
    _Probe(
        chat_of(user("x"), calling(_FIRST, _SECOND), result("y"), result("z", "2")),
        (unchanged, forms.one_call_a_turn, unchanged),
    ),
    _Probe(
        chat_of(
            *(user("w"), assistant("x"), system(_FIRST), user("y")),
            *(assistant("z"), developer(_SECOND), user("x")),
        ),
        (unchanged, forms.later_as_user, unchanged),
    ),
    _Probe(
        chat_of(user("x"), user(_FIRST), assistant("y"), assistant(_SECOND), user("z")),
        (unchanged, forms.runs_merged(forms.continues_turn), unchanged),
    ),
    _Probe(
        chat_of(
            *(user("x"), calling(_MARK, content=_FIRST, reasoning_content="r"), result("y")),
            *(assistant("z"), user("w"), assistant(_SECOND), calling("v"), result("u")),
            *(assistant("t"), user("s")),
        ),
        (unchanged, forms.text_with_calls, forms.apart_from_calls, forms.text_with_calls),
        _all_arrive,
    ),
    _Probe(
        chat_of(user("x"), calling("z"), result(_MARK)),
        (unchanged, forms.with_the_call, unchanged),
        role="tool",
    ),
    _Probe(
        chat_of(user(_FIRST), calling("z"), result(_MARK), user(_SECOND)),
        (unchanged, forms.runs_merged(forms.follows_result), unchanged),
    ),
    _Probe(chat_of(system(_MARK), user("x")), (unchanged, forms.into_next)),
    _Probe(
        chat_of(system(_FIRST), user("x"), calling("z"), result(_SECOND)),
        (unchanged, forms.into_next_before_others, unchanged),
    ),
    _Probe(
        chat_of(user("x"), calling("z", reasoning_content=_MARK), result("y")),
        (forms.under_each_name, forms.as_thinking_part, forms.under_each_name),
    ),
    _Probe(
        chat_of(user(_FIRST), assistant("x"), user(_TWO_PARTS[1:])),
        (unchanged, forms.all_as_text, forms.as_parts, forms.all_as_text),
    ),
    _probe_of_parts("system", system(_TWO_PARTS), user("x")),
    _probe_of_parts("developer", developer(_TWO_PARTS), user("x")),
    _probe_of_parts("user", user(_TWO_PARTS)),
    _probe_of_parts("assistant", user("x"), assistant(_TWO_PARTS), user("y")),
    _probe_of_parts(
        *("assistant", user("x"), calling("z", content=_TWO_PARTS), result("y")),
        is_calling=True,
    ),
    _probe_of_parts("tool", user("x"), calling("z"), result(_TWO_PARTS)),
)
"""In the order in which their forms are applied: each is rendered in those found before it."""


def forms_of(render: Render) -> tuple[Form, ...]:
    """The forms in which a template reads a chat; they are applied in order."""
    found: list[Form] = [forms.never_none, forms.with_role("function", "tool"), forms.in_order]

    def rendered(chat: Chat, last: Form) -> str:
        for form in (*found, last):
            chat = form(chat)
        return render(chat) or ""

    for probe in _PROBES:
        found.append(_form_of(probe, rendered))
    return tuple(found)


def _form_of(probe: _Probe, rendered: Callable[[Chat, Form], str]) -> Form:
    arrives = probe.arrives or partial(_in_their_order, probe.chat)
    for form in probe.forms:
        prompt = rendered(probe.chat, form)
        if form is probe.forms[0] and probe.role and prompt:
            other = rendered(forms.with_role(probe.role, _UNKNOWN_ROLE)(probe.chat), form)
            if other.lower().replace(_UNKNOWN_ROLE, probe.role) == prompt.lower():
                continue  # it writes any role, and does not know this one
        if arrives(prompt):
            return form
    return probe.forms[-1]
