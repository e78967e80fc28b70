"""The forms in which templates read a conversation, and which of them a template reads.

Clients speak one form: OpenAI's. Templates were written for several: one wants a call's arguments
as text, another has no system role. What a template reads is found out when it is loaded: for each
matter a small chat with a mark in it is rendered in one form after the other, until the mark
arrives in the prompt. From then on each chat is brought into the forms that were found. Pure
functions; the probes run during the start, the forms on intake threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Chat = dict[str, Any]
"""A template's variables: `messages`, `tools`, `add_generation_prompt` and others."""
Message = dict[str, Any]
Form = Callable[[Chat], Chat]
Render = Callable[[Chat], str | None]
"""Renders a chat; `None` if the template refuses it."""

_MARK = "mark5eb1"
_CALLED = "called5eb1"
_NO_ROLE = "role5eb1"
_RESULTS = "tool_responses"

_LISTED = "You may call functions to help with the request. They are, one JSON object a line:\n"
_HOW = """

To call one, answer with nothing but
<tool_call>
{"name": "the function's name", "arguments": {its arguments as a JSON object}}
</tool_call>
and wait: the result comes in <tool_response></tool_response>. Otherwise answer in words."""


def as_it_is(chat: Chat) -> Chat:
    return chat


# --- content -----------------------------------------------------------------------------------


def text_of(content: Any) -> str:
    """The text of a message's content; parts are joined by line ends, no content is ""."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text") or "") for part in content)


def with_media_marked(content: Any, mark: str) -> Any:
    """A content with media as a text with a mark in each one's place, as llama.cpp's server joins
    its parts: with a line end between texts, and none beside a medium."""
    if content is None or isinstance(content, str) or not any(map(is_medium, content)):
        return content
    text, is_text_before = "", False
    for part in content:
        if is_medium(part):
            text, is_text_before = text + mark, False
        else:
            text += "\n" * is_text_before + str(part.get("text") or "")
            is_text_before = bool(text)
    return text


def is_medium(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "audio")


def joined(content: Any, text: str, *, between: str = "\n") -> Any:
    """The content with more text behind it; parts stay parts."""
    if content is None or isinstance(content, str):
        return f"{content}{between}{text}" if content else text
    *others, last = content or [{"type": "text"}]
    return [*others, {**last, "text": joined(last.get("text"), text, between=between)}]


def _as_text(chat: Chat) -> Chat:
    return _each(chat, lambda m: {**m, "content": text_of(m.get("content"))})


def _as_parts(chat: Chat) -> Chat:
    def parts(message: Message) -> Message:
        content = message.get("content")
        is_text = isinstance(content, str)
        return {**message, "content": [{"type": "text", "text": content}]} if is_text else message

    return _each(_never_none(chat), parts)


def _never_none(chat: Chat) -> Chat:
    return _each(chat, lambda m: {**m, "content": "" if m.get("content") is None else m["content"]})


# --- the system's words, and tools ---------------------------------------------------------------


def _into_next(chat: Chat) -> Chat:
    """The first message, if it is the system's, at the beginning of the next one."""
    match chat["messages"]:
        case [{"role": "system"} as system, next_message, *others]:
            text = f"{text_of(system.get('content'))}\n{text_of(next_message.get('content'))}"
            return {**chat, "messages": [{**next_message, "content": text}, *others]}
        case [{"role": "system"} as system]:
            return {**chat, "messages": [{**system, "role": "user"}]}
    return chat


def _with_role(chat: Chat, role: str, other: str) -> Chat:
    return _each(chat, lambda m: {**m, "role": other} if m.get("role") == role else m)


def _developer_as_system(chat: Chat) -> Chat:
    return _with_role(chat, "developer", "system")


def _without_none(chat: Chat) -> Chat:
    if chat.get("tools") is None:
        return {name: value for name, value in chat.items() if name != "tools"}
    return chat


def _as_functions(chat: Chat) -> Chat:
    """Under the name that they had before they were called tools, as JSON."""
    functions = [tool["function"] for tool in chat.get("tools") or ()]
    text = json.dumps(functions, ensure_ascii=False, indent=4) if functions else ""
    return {**chat, "functions": text}


def _listed(chat: Chat, how: str = "") -> Chat:
    """Functions described in words, to a model whose template takes none but writes calls."""
    if not (tools := chat.get("tools")):
        return chat
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = _LISTED + "\n".join(lines) + how
    messages = chat["messages"]
    if messages and messages[0].get("role") == "system":
        content = joined(messages[0].get("content"), text, between="\n\n")
        messages = [{**messages[0], "content": content}, *messages[1:]]
    else:
        messages = [{"role": "system", "content": text}, *messages]
    return {**chat, "messages": messages, "tools": None}


def _in_words(chat: Chat) -> Chat:
    """The calls too, in the most widespread form: the template knows of neither.

    Calls in earlier messages, and their results, become text in that form.
    """
    messages: list[Message] = []
    answers_before = False
    for message in chat["messages"]:
        answers = message.get("role") in ("tool", "function")
        if answers:
            text = f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"
            if answers_before:  # the results of parallel calls make one turn
                messages[-1]["content"] += f"\n{text}"
            else:
                messages.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            texts = [text_of(message.get("content")), *map(_call_in_words, calls)]
            own = {name: value for name, value in message.items() if name != "tool_calls"}
            messages.append({**own, "content": "\n".join(text for text in texts if text)})
        else:
            messages.append(message)
        answers_before = answers
    return _listed({**chat, "messages": messages}, _HOW)


def _call_in_words(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": _parsed(function.get("arguments")) or {}}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


# --- calls and their results ---------------------------------------------------------------------


def _parsed(arguments: Any) -> Any:
    """Arguments as an object; what is no JSON object stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _as_objects(chat: Chat) -> Chat:
    return _with_arguments(chat, _parsed)


def _as_json(chat: Chat) -> Chat:
    def written(arguments: Any) -> Any:
        is_text = isinstance(arguments, str)
        return arguments if is_text else json.dumps(arguments, ensure_ascii=False)

    return _with_arguments(chat, written)


def _with_arguments(chat: Chat, change: Callable[[Any], Any]) -> Chat:
    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = change(function.get("arguments", ""))
        return {**call, "function": {**function, "arguments": arguments}}

    def own(message: Message) -> Message:
        calls = message.get("tool_calls")
        return {**message, "tool_calls": [changed(call) for call in calls]} if calls else message

    return _each(chat, own)


def _with_the_call(chat: Chat) -> Chat:
    """Results, and the answer after them, in the message that made the calls."""
    messages: list[Message] = []
    open_calls: list[Any] = []
    for message in chat["messages"]:
        role = message.get("role")
        if role == "tool" and messages and messages[-1].get("tool_calls"):
            by_id = {call.get("id"): call for call in open_calls}
            call = by_id.get(message.get("tool_call_id")) or (open_calls[:1] or [None])[0]
            if call in open_calls:
                open_calls.remove(call)
            name = call["function"]["name"] if call else message.get("name", "")
            content = text_of(message.get("content"))
            messages[-1].setdefault(_RESULTS, [])
            messages[-1][_RESULTS].append({"name": name, "response": _parsed(content)})
        elif (
            role == "assistant"
            and messages
            and messages[-1].get(_RESULTS)
            and not messages[-1].get("content")
            and not message.get("tool_calls")
        ):
            messages[-1]["content"] = message.get("content")
        else:
            messages.append(dict(message))
            open_calls = list(message.get("tool_calls") or ())
    return {**chat, "messages": messages}


# --- reasoning -----------------------------------------------------------------------------------


def _under_each_name(chat: Chat) -> Chat:
    """Reasoning as `reasoning_content` and as `thinking`, as transformers gives it."""

    def named(message: Message) -> Message:
        reasoning = message.get("reasoning_content")
        return {"thinking": reasoning, **message} if reasoning is not None else message

    return _each(chat, named)


def _as_thinking_part(chat: Chat) -> Chat:
    """Reasoning as the first part of the content."""

    def with_part(message: Message) -> Message:
        own = dict(message)
        reasoning = own.pop("reasoning_content", None)
        if reasoning is None:
            return own
        text = text_of(own.get("content"))
        parts = [{"type": "thinking", "thinking": reasoning}]
        return {**own, "content": parts + ([{"type": "text", "text": text}] if text else [])}

    return _each(chat, with_part)


def _each(chat: Chat, change: Callable[[Message], Message]) -> Chat:
    return {**chat, "messages": [change(message) for message in chat["messages"]]}


# --- which form a template reads -----------------------------------------------------------------


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _calling(arguments: Any, **more: Any) -> Message:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def _result(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "call00001", "content": content}


def _tool(name: str = "f") -> dict[str, Any]:
    key = {"type": "string", "description": "A key"}
    parameters = {"type": "object", "properties": {"key": key}, "required": ["key"]}
    function = {"name": name, "description": "A function", "parameters": parameters}
    return {"type": "function", "function": function}


def _chat(*messages: Message, tools: Any = None) -> Chat:
    return {"messages": list(messages), "tools": tools, "add_generation_prompt": True}


def _arrives(prompt: str) -> bool:
    return _MARK in prompt


def _arrives_alone(prompt: str) -> bool:
    """Not as Python prints a list of parts."""
    return _MARK in prompt and f"'{_MARK}'" not in prompt and f'"{_MARK}"' not in prompt


def _arrives_twice(prompt: str) -> bool:
    return _arrives_alone(prompt) and prompt.count(_MARK) == 2


def _arrives_as_json(prompt: str) -> bool:
    """Not as Python prints an object, nor as text that was quoted once more."""
    printed = repr({"key": _MARK})
    return _MARK in prompt and printed not in prompt and f'\\"{_MARK}\\"' not in prompt


def _tells_tools(prompt: str) -> bool:
    """Where words list them, the template must write the calls."""
    return _MARK in prompt and (_LISTED not in prompt or _CALLED in prompt)


@dataclass(frozen=True, slots=True)
class _Matter:
    """Something that templates read in different forms."""

    probe: Chat
    forms: tuple[Form, ...]
    """The last one is taken if the mark arrives in none."""
    arrives: Callable[[str], bool] = _arrives
    role: str = ""
    """The first form has this role, and is none for a template that does not know it."""


_PART = {"type": "text", "text": _MARK}
_MATTERS = (
    _Matter(_chat(_user(_MARK)), (as_it_is, _without_none, as_it_is)),
    _Matter(
        _chat({"role": "developer", "content": _MARK}, _user("x")),
        (as_it_is, _developer_as_system),
        role="developer",
    ),
    _Matter(
        _chat(_user("x"), _calling({"key": _MARK}), _result("y"), tools=[_tool()]),
        (_as_objects, _as_json, _as_objects),
        _arrives_as_json,
    ),
    _Matter(
        _chat(_user("x"), _calling({"key": _CALLED}), _result("y"), tools=[_tool(_MARK)]),
        (as_it_is, _as_functions, _listed, _in_words),
        _tells_tools,
    ),
    _Matter(_chat({"role": "system", "content": _MARK}, _user("x")), (as_it_is, _into_next)),
    _Matter(
        _chat(_user("x"), _calling({"key": "z"}), _result(_MARK), tools=[_tool()]),
        (as_it_is, _with_the_call, as_it_is),
        role="tool",
    ),
    _Matter(
        _chat(
            _user("x"),
            _calling({"key": "z"}, reasoning_content=_MARK),
            _result("y"),
            tools=[_tool()],
        ),
        (_under_each_name, _as_thinking_part, _under_each_name),
        _arrives_alone,
    ),
    _Matter(
        _chat(_user(_MARK), {"role": "assistant", "content": "x"}, _user([_PART])),
        (_never_none, _as_text, _as_parts, _as_text),
        _arrives_twice,
    ),
)
"""In the order in which the forms are taken on."""


def forms_of(render: Render) -> tuple[Form, ...]:
    """The forms in which a template reads a chat; they are applied in order."""
    found: list[Form] = []

    def rendered(chat: Chat, last: Form) -> str:
        for form in (*found, last):
            chat = form(chat)
        return render(chat) or ""

    for matter in _MATTERS:
        for form in matter.forms:
            prompt = rendered(matter.probe, form)
            if form is matter.forms[0] and matter.role and prompt:
                other = rendered(_with_role(matter.probe, matter.role, _NO_ROLE), form)
                if other.lower().replace(_NO_ROLE, matter.role) == prompt.lower():
                    continue  # it writes whatever the role is
            if matter.arrives(prompt):
                break
        found.append(form)
    return tuple(found)


def tells_tools_in_words(forms: tuple[Form, ...]) -> bool:
    return _in_words in forms or _listed in forms
