"""Which forms a template reads.

It is found out when the template is loaded: for each matter a small chat with a mark in it is
rendered in one form after the other, until the mark arrives in the prompt. From then on each chat
is brought into the forms that were found. The probes run during the start.
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
    as_it_is,
    assistant,
    developer,
    said,
    system,
    user,
    without,
)

Render = Callable[[Chat], str | None]
"""Renders a chat; `None` if the template refuses it."""

_MARK = "mark5eb1"
_FIRST, _SECOND = "first5eb1", "second5eb1"
_CALLED = "called5eb1"
_NO_ROLE = "role5eb1"
_ID = "call_0123456789abcdef0123456"
"""Of a call, but for the last digit: as this worker makes them, and most others."""


def calling(*keys: str, content: Any = "", **more: Any) -> Message:
    calls = [
        {"id": _ID + id, "type": "function", "function": {"name": "f", "arguments": {"key": key}}}
        for id, key in zip("12", keys, strict=False)
    ]
    return assistant(content, tool_calls=calls, **more)


def result(content: Any, id: str = "1") -> Message:
    return said("tool", content, tool_call_id=_ID + id)


def _without_id(message: Message) -> Message:
    return forms.with_calls(without(message, "tool_call_id"), lambda call: without(call, "id"))


def _tool(name: str = "f") -> dict[str, Any]:
    key = {"type": "string", "description": "A key"}
    parameters = {"type": "object", "properties": {"key": key}, "required": ["key"]}
    return _bare(name, description="A function", parameters=parameters)


def _bare(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def chat_of(*messages: Message, tools: Sequence[Any] = ()) -> Chat:
    """With a tool, if it has calls or results."""
    uses_tools = any({"tool_calls", "tool_call_id"} & message.keys() for message in messages)
    given = tools or ([_tool()] if uses_tools else None)
    return {"messages": list(messages), "tools": given, "add_generation_prompt": True}


Arrives = Callable[[str], bool]
"""Whether a prompt says all that its probe says."""


def _in_their_order(probe: Chat, prompt: str) -> bool:
    """All marks of the probe, in this order, and not as Python or JSON prints a list of parts."""
    marks = [mark for mark in (_FIRST, _MARK, _SECOND) if mark in str(probe)]
    places = [prompt.find(mark) for mark in marks]
    printed = rf"""["'](text|thinking)["']: ?["']({"|".join(marks)})"""
    return places[0] >= 0 and places == sorted(places) and not re.search(printed, prompt)


def _all_arrive(prompt: str) -> bool:
    """In whichever order the template has for words and the calls beside which they stand."""
    return all(mark in prompt for mark in (_FIRST, _MARK, _SECOND))


def _arrives_as_json(prompt: str) -> bool:
    """Not as Python prints an object, nor as text that was quoted once more."""
    printed = repr({"key": _MARK})
    return _MARK in prompt and printed not in prompt and f'\\"{_MARK}\\"' not in prompt


def _tells_tools(prompt: str) -> bool:
    """Where words list them, the template must write the calls."""
    return _MARK in prompt and (forms.LISTED not in prompt or _CALLED in prompt)


@dataclass(frozen=True, slots=True)
class _Matter:
    """Something that templates read in different forms."""

    probe: Chat
    forms: tuple[Form, ...]
    """The last one is taken if the marks arrive in none."""
    arrives: Arrives | None = None
    """`None`: `_in_their_order`."""
    role: str = ""
    """The first form has this role, and is none for a template that does not know it."""


def _matter_of_parts(role: str, *messages: Message, is_calling: bool = False) -> _Matter:
    """Whether two parts of one message arrive: a template may read each role in its own way."""

    def which(message: Message) -> bool:
        return message.get("role") == role and bool(message.get("tool_calls")) is is_calling

    return _Matter(chat_of(*messages), (as_it_is, forms.as_text(which), as_it_is))


_TWO_PARTS = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]

_MATTERS = (
    _Matter(chat_of(user(_MARK)), (as_it_is, forms.without_none, as_it_is)),
    _Matter(
        chat_of(user("x"), tools=[_bare(_FIRST), _bare(_SECOND, parameters={})]),
        (as_it_is, forms.complete, as_it_is),
    ),
    _Matter(
        chat_of(developer(_MARK), user("x")),
        (as_it_is, forms.with_role("developer", "system")),
        role="developer",
    ),
    _Matter(
        chat_of(system(_FIRST), system(_MARK), developer(_SECOND), user("x")),
        (as_it_is, partial(forms.one_beginning, of_each_role=True), forms.one_beginning),
    ),
    _Matter(
        chat_of(
            *(user("x"), calling("y"), result(_FIRST)),
            *(calling("s", "t"), *map(_without_id, (result("u"), result("v")))),
            *map(_without_id, (calling("w", "z"), result(_MARK), result(_SECOND))),
        ),
        (as_it_is, forms.paired, forms.with_short_ids, as_it_is),
    ),
    _Matter(
        chat_of(user("x"), calling(_MARK), result("y")),
        (forms.as_objects, forms.with_arguments(forms.written), forms.as_objects),
        _arrives_as_json,
    ),
    _Matter(
        chat_of(user("x"), calling(_CALLED), result("y"), tools=[_tool(_MARK)]),
        (as_it_is, forms.as_functions, forms.listed, forms.in_words),
        _tells_tools,
    ),
    _Matter(
        chat_of(user("x"), result(_MARK), assistant("y"), user("z")),
        (as_it_is, forms.strays_as_user, as_it_is),
    ),
    _Matter(
        chat_of(user("x"), calling(_FIRST, _SECOND), result("y"), result("z", "2")),
        (as_it_is, forms.one_call_a_turn, as_it_is),
    ),
    _Matter(
        chat_of(
            *(user("w"), assistant("x"), system(_FIRST), user("y")),
            *(assistant("z"), developer(_SECOND), user("x")),
        ),
        (as_it_is, forms.later_as_user, as_it_is),
    ),
    _Matter(
        chat_of(user("x"), user(_FIRST), assistant("y"), assistant(_SECOND), user("z")),
        (as_it_is, forms.runs_merged(forms.is_of_the_turn), as_it_is),
    ),
    _Matter(
        chat_of(
            *(user("x"), calling(_MARK, content=_FIRST, reasoning_content="r"), result("y")),
            *(assistant("z"), user("w"), assistant(_SECOND), calling("v"), result("u")),
            *(assistant("t"), user("s")),
        ),
        (as_it_is, forms.words_with_calls, forms.apart_from_calls, forms.words_with_calls),
        _all_arrive,
    ),
    _Matter(
        chat_of(user("x"), calling("z"), result(_MARK)),
        (as_it_is, forms.with_the_call, as_it_is),
        role="tool",
    ),
    _Matter(
        chat_of(user(_FIRST), calling("z"), result(_MARK), user(_SECOND)),
        (as_it_is, forms.runs_merged(forms.is_behind_result), as_it_is),
    ),
    _Matter(chat_of(system(_MARK), user("x")), (as_it_is, forms.into_next)),
    _Matter(
        chat_of(system(_FIRST), user("x"), calling("z"), result(_SECOND)),
        (as_it_is, forms.into_next_before_others, as_it_is),
    ),
    _Matter(
        chat_of(user("x"), calling("z", reasoning_content=_MARK), result("y")),
        (forms.under_each_name, forms.as_thinking_part, forms.under_each_name),
    ),
    _Matter(
        chat_of(user(_FIRST), assistant("x"), user(_TWO_PARTS[1:])),
        (as_it_is, forms.all_as_text, forms.as_parts, forms.all_as_text),
    ),
    _matter_of_parts("system", system(_TWO_PARTS), user("x")),
    _matter_of_parts("developer", developer(_TWO_PARTS), user("x")),
    _matter_of_parts("user", user(_TWO_PARTS)),
    _matter_of_parts("assistant", user("x"), assistant(_TWO_PARTS), user("y")),
    _matter_of_parts(
        *("assistant", user("x"), calling("z", content=_TWO_PARTS), result("y")),
        is_calling=True,
    ),
    _matter_of_parts("tool", user("x"), calling("z"), result(_TWO_PARTS)),
)
"""In the order in which the forms are taken on."""


def forms_of(render: Render) -> tuple[Form, ...]:
    """The forms in which a template reads a chat; they are applied in order."""
    found: list[Form] = [forms.never_none, forms.with_role("function", "tool"), forms.in_order]

    def rendered(chat: Chat, last: Form) -> str:
        for form in (*found, last):
            chat = form(chat)
        return render(chat) or ""

    for matter in _MATTERS:
        found.append(_form_of(matter, rendered))
    return tuple(found)


def _form_of(matter: _Matter, rendered: Callable[[Chat, Form], str]) -> Form:
    arrives = matter.arrives or partial(_in_their_order, matter.probe)
    for form in matter.forms:
        prompt = rendered(matter.probe, form)
        if form is matter.forms[0] and matter.role and prompt:
            other = rendered(forms.with_role(matter.role, _NO_ROLE)(matter.probe), form)
            if other.lower().replace(_NO_ROLE, matter.role) == prompt.lower():
                continue  # it writes whatever the role is
        if arrives(prompt):
            return form
    return matter.forms[-1]
