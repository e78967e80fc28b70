"""The forms in which templates read a conversation, and which of them a template reads.

Clients speak one form: OpenAI's. Templates were written for several: one wants a call's arguments
as text, another has no system role. What a template reads is found out when it is loaded: for each
matter a small chat with a mark in it is rendered in one form after the other, until the mark
arrives in the prompt. From then on each chat is brought into the forms that were found. Pure
functions; the probes run during the start, the forms on intake threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import Any

Chat = dict[str, Any]
"""A template's variables: `messages`, `tools`, `add_generation_prompt` and others."""
Message = dict[str, Any]
Form = Callable[[Chat], Chat]
Render = Callable[[Chat], str | None]
"""Renders a chat; `None` if the template refuses it."""

_MARK = "mark5eb1"
_FIRST, _SECOND = "first5eb1", "second5eb1"
_CALLED = "called5eb1"
_NO_ROLE = "role5eb1"
_RESULTS = "tool_responses"
_SYSTEM = ("system", "developer")
_TOOL = ("tool", "function")
_PARAGRAPH = "\n\n"
_LONG_ID = "call_0123456789abcdef01234567"
"""As this worker makes them, and most others."""

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


def with_media_marked(content: Any, marks: Iterator[str]) -> Any:
    """A content with media as a text with the next of the marks in each one's place, as llama.cpp's
    server joins its parts: with a line end between texts, and none beside a medium."""
    if content is None or isinstance(content, str) or not any(map(is_medium, content)):
        return content
    text, is_text_before = "", False
    for part in content:
        if is_medium(part):
            text, is_text_before = text + next(marks), False
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


def _empty_is_none(chat: Chat) -> Chat:
    """An empty list is no content: some templates read the first part without a look."""

    def own(message: Message) -> Message:
        content = message.get("content")
        is_empty = isinstance(content, list | tuple) and not content
        return {**message, "content": None} if is_empty else message

    return _each(chat, own)


def _as_text(chat: Chat) -> Chat:
    return _each(chat, lambda m: {**m, "content": text_of(m.get("content"))})


Which = Callable[[Message], bool]
"""Whether a message is one of those that a template reads alike."""


def _parts_joined(which: Which, chat: Chat) -> Chat:
    """Texts that follow each other as one part: for templates that read the first part alone."""

    def own(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list | tuple) or not which(message):
            return message
        parts: list[Message] = []
        for part in content:
            if parts and part.get("type") == parts[-1].get("type") == "text":
                parts[-1] = {**parts[-1], "text": text_of([parts[-1], part])}
            else:
                parts.append(part)
        return {**message, "content": parts}

    return _each(chat, own)


def _parts_as_text(which: Which, chat: Chat) -> Chat:
    def own(message: Message) -> Message:
        content = message.get("content")
        are_parts = isinstance(content, list | tuple) and which(message)
        return {**message, "content": text_of(content)} if are_parts else message

    return _each(chat, own)


def _as_parts(chat: Chat) -> Chat:
    def parts(message: Message) -> Message:
        content = message.get("content")
        is_text = isinstance(content, str)
        return {**message, "content": [{"type": "text", "text": content}]} if is_text else message

    return _each(_never_none(chat), parts)


def _never_none(chat: Chat) -> Chat:
    return _each(chat, lambda m: {**m, "content": "" if m.get("content") is None else m["content"]})


# --- messages that follow each other -------------------------------------------------------------


def _merged(first: Message, second: Message) -> Message:
    """Two messages as one: their words as paragraphs, and the calls of the second."""
    merged = dict(first)
    if calls := second.get("tool_calls"):
        merged["tool_calls"] = calls
    for name in ("content", "reasoning_content"):
        texts = [text for each in (first, second) if (text := text_of(each.get(name)))]
        if texts:
            merged[name] = _PARAGRAPH.join(texts)
    return merged


def _alike(chat: Chat, are_alike: Callable[[Message, Message], bool]) -> Chat:
    """Each message that is like the one before it, merged with that."""
    messages: list[Message] = []
    for message in chat["messages"]:
        if messages and are_alike(messages[-1], message):
            messages[-1] = _merged(messages[-1], message)
        else:
            messages.append(message)
    return {**chat, "messages": messages}


def _turns_joined(chat: Chat) -> Chat:
    """For templates whose roles must alternate."""

    def are_alike(before: Message, message: Message) -> bool:
        is_turn = message.get("role") in ("user", "assistant")
        has_calls = before.get("tool_calls") or message.get("tool_calls")
        return is_turn and before.get("role") == message["role"] and not has_calls

    return _alike(chat, are_alike)


def _joined_with_calls(chat: Chat) -> Chat:
    """The assistant's words and the calls of its next message as one; some templates would drop the
    words there."""

    def are_alike(before: Message, message: Message) -> bool:
        are_its = before.get("role") == message.get("role") == "assistant"
        return are_its and bool(message.get("tool_calls")) and not before.get("tool_calls")

    return _alike(chat, are_alike)


def _joined_with_result(chat: Chat) -> Chat:
    """A user's words behind a result in the result: some templates want an answer before them."""

    def are_alike(before: Message, message: Message) -> bool:
        return before.get("role") in _TOOL and message.get("role") == "user"

    return _alike(chat, are_alike)


# --- the system's words, and tools ---------------------------------------------------------------


def _beginning(chat: Chat) -> list[Message]:
    """The system's messages before all others."""
    return list(takewhile(lambda m: m.get("role") in _SYSTEM, chat["messages"]))


def _one_of_each_role(chat: Chat) -> Chat:
    """The system's neighbouring messages at the beginning as one; a developer's stay apart."""
    n = len(_beginning(chat))
    head = {**chat, "messages": chat["messages"][:n]}
    head = _alike(head, lambda before, message: before.get("role") == message.get("role"))
    return {**chat, "messages": [*head["messages"], *chat["messages"][n:]]}


def _one_beginning(chat: Chat) -> Chat:
    """All messages of the system and of a developer at the beginning as one."""
    n = len(_beginning(chat))
    head = _alike({**chat, "messages": chat["messages"][:n]}, lambda before, message: True)
    return {**chat, "messages": [*head["messages"], *chat["messages"][n:]]}


def _later_as_user(chat: Chat) -> Chat:
    """What the system says later as the user's words, before those of a turn that follows."""
    messages = _beginning(chat)
    is_told = False
    for message in chat["messages"][len(messages) :]:
        is_system = message.get("role") in _SYSTEM
        own = {**message, "role": "user"} if is_system else message
        if is_told and own.get("role") == "user":
            messages[-1] = _merged(messages[-1], own)
        else:
            messages.append(own)
        is_told = is_system
    return {**chat, "messages": messages}


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


def _function_as_tool(chat: Chat) -> Chat:
    return _each(chat, lambda m: {**m, "role": "tool"} if m.get("role") == "function" else m)


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
        answers = message.get("role") in _TOOL
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
        elif answers_before and message.get("role") == "user":  # the results are the user's turn
            messages[-1] = _merged(messages[-1], message)
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


def _one_call_a_turn(chat: Chat) -> Chat:
    """Parallel calls as turns of their own, each with its result behind it."""
    messages: list[Message] = []
    calls: list[Any] = []
    """Those of the turn before, whose results are to come."""
    results: list[Message] = []

    def close() -> None:
        ids = [id for call in calls if (id := call.get("id"))]
        for index, call in enumerate(calls):
            if index:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            id = call.get("id")
            own = [each for each in results if id and each.get("tool_call_id") == id]
            own = own[:1] if ids.count(id) > 1 else own
            nobodys = [each for each in results if each.get("tool_call_id") not in ids]
            for each in own or nobodys[:1]:
                results.remove(each)
                messages.append(each)
        messages.extend(results)
        calls.clear()
        results.clear()

    for message in chat["messages"]:
        if calls and message.get("role") in _TOOL:
            results.append(message)
            continue
        close()
        if len(message.get("tool_calls") or ()) > 1:
            calls.extend(message["tool_calls"])
            messages.append({**message, "tool_calls": calls[:1]})
        else:
            messages.append(message)
    close()
    return {**chat, "messages": messages}


_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)


def _with_short_ids(chat: Chat) -> Chat:
    """Ids of calls as Mistral has them, of 9 letters and digits; calls without one are numbered."""
    n_calls = 0
    open_ids: list[str] = []

    def short(id: str) -> str:
        return id if _SHORT_ID.fullmatch(id) else sha256(id.encode()).hexdigest()[:9]

    def own(message: Message) -> Message:
        nonlocal n_calls
        if calls := message.get("tool_calls"):
            open_ids.clear()
            for call in calls:
                n_calls += 1
                open_ids.append(short(call.get("id") or f"call{n_calls:05}"))
            named = [{**call, "id": id} for call, id in zip(calls, open_ids, strict=True)]
            return {**message, "tool_calls": named}
        if message.get("role") in _TOOL:
            given = message.get("tool_call_id")
            id = short(given) if given else open_ids[0] if open_ids else short("")
            if id in open_ids:
                open_ids.remove(id)
            return {**message, "tool_call_id": id}
        return message

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


def _assistant(content: Any) -> Message:
    return {"role": "assistant", "content": content}


def _system(content: Any, role: str = "system") -> Message:
    return {"role": role, "content": content}


def _calling(*arguments: Any, **more: Any) -> Message:
    calls = [
        {
            "id": f"call0000{number}",
            "type": "function",
            "function": {"name": "f", "arguments": given},
        }
        for number, given in enumerate(arguments, 1)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def _result(content: Any, number: int = 1) -> Message:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


def _named(id: str, message: Message) -> Message:
    """The message with that id of its call."""
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": id} for call in calls]}
    return {**message, "tool_call_id": id}


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


def _both_arrive(prompt: str) -> bool:
    return 0 <= prompt.find(_FIRST) < prompt.find(_SECOND)


def _all_arrive(prompt: str) -> bool:
    return 0 <= prompt.find(_FIRST) < prompt.find(_MARK) < prompt.find(_SECOND)


def _both_arrive_as_text(prompt: str) -> bool:
    """Not as Python or JSON prints a list of parts."""
    return _both_arrive(prompt) and not re.search(rf"""["']text["']: ?["']{_FIRST}""", prompt)


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
_TWO_PARTS = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]


def _matter_of_parts(which: Which, *messages: Message, tools: Any = None) -> _Matter:
    """Whether two parts of one message arrive: a template may read each role in its own way."""
    forms = (as_it_is, partial(_parts_joined, which), partial(_parts_as_text, which), as_it_is)
    return _Matter(_chat(*messages, tools=tools), forms, _both_arrive_as_text)


def _is(*roles: str, calling: bool = False) -> Which:
    return lambda message: (
        message.get("role") in roles and bool(message.get("tool_calls")) is calling
    )


_MATTERS = (
    _Matter(_chat(_user(_MARK)), (as_it_is, _without_none, as_it_is)),
    _Matter(
        _chat(_system(_MARK, "developer"), _user("x")),
        (as_it_is, _developer_as_system),
        role="developer",
    ),
    _Matter(
        _chat(_system(_FIRST), _system(_MARK), _system(_SECOND, "developer"), _user("x")),
        (as_it_is, _one_of_each_role, _one_beginning),
        _all_arrive,
    ),
    _Matter(
        _chat(_user("x"), _calling({"key": _MARK}), _result("y"), tools=[_tool()]),
        (_as_objects, _as_json, _as_objects),
        _arrives_as_json,
    ),
    _Matter(
        _chat(
            *(_user("x"), _calling({"key": "z"}), {**_result(_MARK), "role": "function"}),
            tools=[_tool()],
        ),
        (as_it_is, _function_as_tool),
        role="function",
    ),
    _Matter(
        _chat(_user("x"), _calling({"key": _CALLED}), _result("y"), tools=[_tool(_MARK)]),
        (as_it_is, _as_functions, _listed, _in_words),
        _tells_tools,
    ),
    _Matter(
        _chat(
            _user("x"),
            _calling({"key": _FIRST}, {"key": _SECOND}),
            _result("y", 1),
            _result("z", 2),
            tools=[_tool()],
        ),
        (as_it_is, _one_call_a_turn, as_it_is),
        _both_arrive,
    ),
    _Matter(
        _chat(
            _user("x"),
            _named(_LONG_ID, _calling({"key": "z"})),
            _named(_LONG_ID, _result(_MARK)),
            tools=[_tool()],
        ),
        (as_it_is, _with_short_ids, as_it_is),
    ),
    _Matter(_chat(_system(_MARK), _user("x")), (as_it_is, _into_next)),
    _Matter(
        _chat(
            *(_user("w"), _assistant("x"), _system(_FIRST), _user("y")),
            *(_assistant("z"), _system(_SECOND, "developer"), _user("x")),
        ),
        (as_it_is, _later_as_user, as_it_is),
        _both_arrive,
    ),
    _Matter(
        _chat(_user("x"), _user(_FIRST), _assistant("y"), _assistant(_SECOND), _user("z")),
        (as_it_is, _turns_joined, as_it_is),
        _both_arrive,
    ),
    _Matter(
        _chat(
            *(_user("x"), _assistant(_FIRST), _calling({"key": _SECOND}), _result("y")),
            *(_assistant("z"), _user("w")),
            tools=[_tool()],
        ),
        (as_it_is, _joined_with_calls, as_it_is),
        _both_arrive,
    ),
    _Matter(
        _chat(_user("x"), _calling({"key": "z"}), _result(_MARK), tools=[_tool()]),
        (as_it_is, _with_the_call, as_it_is),
        role="tool",
    ),
    _Matter(
        _chat(
            *(_system(_FIRST), _user("x"), _calling({"key": "z"}), _result(_MARK), _user(_SECOND)),
            tools=[_tool()],
        ),
        (as_it_is, _joined_with_result, as_it_is),
        _all_arrive,
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
        _chat(_user(_MARK), _assistant("x"), _user([_PART])),
        (_never_none, _as_text, _as_parts, _as_text),
        _arrives_twice,
    ),
    _matter_of_parts(_is("system"), _system(_TWO_PARTS), _user("x")),
    _matter_of_parts(_is("developer"), _system(_TWO_PARTS, "developer"), _user("x")),
    _matter_of_parts(_is("user"), _user(_TWO_PARTS)),
    _matter_of_parts(_is("assistant"), _user("x"), _assistant(_TWO_PARTS), _user("y")),
    _matter_of_parts(
        _is("assistant", calling=True),
        *(_user("x"), _calling({"key": "z"}, content=_TWO_PARTS), _result("y")),
        tools=[_tool()],
    ),
    _matter_of_parts(
        _is(*_TOOL),
        *(_user("x"), _calling({"key": "z"}), _result(_TWO_PARTS)),
        tools=[_tool()],
    ),
)
"""In the order in which the forms are taken on."""


def forms_of(render: Render) -> tuple[Form, ...]:
    """The forms in which a template reads a chat; they are applied in order."""
    found: list[Form] = [_empty_is_none]

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
