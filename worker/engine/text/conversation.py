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
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain, count, takewhile
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
_PARAGRAPH = "\n\n"
_ID = "call_0123456789abcdef0123456"
"""Of a call, but for the last digit: as this worker makes them, and most others."""

_LISTED = "You may call functions to help with the request. They are, one JSON object a line:\n"
_HOW = """

To call one, answer with nothing but
<tool_call>
{"name": "the function's name", "arguments": {its arguments as a JSON object}}
</tool_call>
and wait: the result comes in <tool_response></tool_response>. Otherwise answer in words."""


def without(given: Mapping[str, Any], left_out: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != left_out}


def as_it_is(chat: Chat) -> Chat:
    return chat


def _of_messages(change: Callable[[list[Message]], Iterable[Message]]) -> Form:
    """The form in which the messages are changed so, and the rest is as it is."""
    return lambda chat: {**chat, "messages": [*change(chat["messages"])]}


def _of_each(change: Callable[[Message], Message]) -> Form:
    return _of_messages(partial(map, change))


# --- content -----------------------------------------------------------------------------------


def text_of(content: Any) -> str:
    """The text of a message's content; parts are joined by line ends, no content is ""."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text") or "") for part in content)


def joined(content: Any, text: str, *, between: str = "\n") -> Any:
    """The content with more text behind it; parts stay parts."""
    if content is None or isinstance(content, str):
        return f"{content}{between}{text}" if content else text
    *others, last = content or [{"type": "text"}]
    return [*others, {**last, "text": joined(last.get("text"), text, between=between)}]


_never_none = _of_each(lambda m: {**m, "content": m.get("content") or ""})
"""Some templates print what is no content, and read the first part of a list without a look."""


Which = Callable[[Message], bool]
"""Whether a message is one of those that a template reads alike."""


def _as_text(which: Which) -> Form:
    return _of_each(lambda m: {**m, "content": text_of(m.get("content"))} if which(m) else m)


_all_as_text = _as_text(lambda message: True)


@_of_each
def _as_parts(message: Message) -> Message:
    content = message["content"]
    is_text = isinstance(content, str)
    return {**message, "content": [{"type": "text", "text": content}]} if is_text else message


# --- messages that follow each other -------------------------------------------------------------


Follows = Callable[[list[Message], Message], bool]
"""Whether a message is one with the messages before it."""


def _runs(messages: Iterable[Message], follows: Follows) -> Iterator[list[Message]]:
    run: list[Message] = []
    for message in messages:
        if run and not follows(run, message):
            yield run
            run = []
        run.append(message)
    if run:
        yield run


def _merged(run: list[Message]) -> Message:
    """Messages as the first of them: their words as paragraphs, and their calls."""
    if len(run) == 1:
        return run[0]
    merged = dict(run[0])
    if calls := [call for each in run for call in each.get("tool_calls") or ()]:
        merged["tool_calls"] = calls
    for name in ("content", "reasoning_content"):
        if texts := [text for each in run if (text := text_of(each.get(name)))]:
            merged[name] = _PARAGRAPH.join(texts)
    return merged


def _runs_merged(follows: Follows) -> Form:
    return _of_messages(lambda messages: map(_merged, _runs(messages, follows)))


def _is_of_the_turn(run: list[Message], message: Message) -> bool:
    """For templates whose roles must alternate."""
    is_turn = message.get("role") in ("user", "assistant")
    has_calls = run[-1].get("tool_calls") or message.get("tool_calls")
    return is_turn and run[-1].get("role") == message["role"] and not has_calls


def _calls_after_words(run: list[Message], message: Message) -> bool:
    are_its = run[-1].get("role") == message.get("role") == "assistant"
    return are_its and bool(message.get("tool_calls")) and not run[-1].get("tool_calls")


def _is_behind_result(run: list[Message], message: Message) -> bool:
    """A user's words: some templates want an answer before them, and take them in the result."""
    return run[0].get("role") == "tool" and message.get("role") == "user"


_words_with_calls = _runs_merged(_calls_after_words)


@_of_messages
def _apart_from_calls(messages: list[Message]) -> Iterator[Message]:
    """The assistant's words in a message before that of the calls beside which they stand."""
    for message in messages:
        if message.get("tool_calls") and text_of(message.get("content")):
            yield _assistant(message["content"])
            message = {**message, "content": ""}
        yield message


# --- the system's words, and tools ---------------------------------------------------------------


def _halves(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system's messages before all others, and those."""
    beginning = list(takewhile(lambda m: m.get("role") in _SYSTEM, messages))
    return beginning, messages[len(beginning) :]


def _one_beginning(chat: Chat, *, of_each_role: bool = False) -> Chat:
    """All messages of the system and of a developer at the beginning as one; or those of each."""

    def follows(run: list[Message], message: Message) -> bool:
        return not of_each_role or run[0].get("role") == message.get("role")

    beginning, others = _halves(chat["messages"])
    return {**chat, "messages": [*map(_merged, _runs(beginning, follows)), *others]}


@_of_messages
def _later_as_user(messages: list[Message]) -> Iterator[Message]:
    """What the system says later as the user's words, before those of a turn that follows."""

    def follows(run: list[Message], message: Message) -> bool:
        return run[-1].get("role") in _SYSTEM and message.get("role") in (*_SYSTEM, "user")

    beginning, others = _halves(messages)
    yield from beginning
    for message in map(_merged, _runs(others, follows)):
        yield {**message, "role": "user"} if message.get("role") in _SYSTEM else message


@_of_messages
def _into_next(messages: list[Message]) -> list[Message]:
    """The first message, if it is the system's, at the beginning of the next one."""
    match messages:
        case [{"role": "system"} as system, next_message, *others]:
            text = f"{text_of(system.get('content'))}\n{text_of(next_message.get('content'))}"
            return [{**next_message, "content": text}, *others]
        case [{"role": "system"} as system]:
            return [{**system, "role": "user"}]
    return messages


def _with_role(role: str, other: str) -> Form:
    return _of_each(lambda m: {**m, "role": other} if m.get("role") == role else m)


def _into_next_before_others(chat: Chat) -> Chat:
    """As `_into_next`, unless the user's words come last: some templates write the system's before
    these, and nowhere else."""
    ends_with_user = chat["messages"] and chat["messages"][-1].get("role") == "user"
    return chat if ends_with_user else _into_next(chat)


def _without_none(chat: Chat) -> Chat:
    return without(chat, "tools") if chat.get("tools") is None else chat


def _complete(chat: Chat) -> Chat:
    """Tools with all that a function may leave out."""

    def function(given: Mapping[str, Any]) -> dict[str, Any]:
        schema = given.get("parameters") or {}
        whole = {**given, "parameters": {**schema, "type": "object", "properties": {}, **schema}}
        return {**whole, "description": "", **whole}

    tools = [{**tool, "function": function(tool["function"])} for tool in chat.get("tools") or ()]
    return {**chat, "tools": tools} if tools else chat


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

    def follows(run: list[Message], message: Message) -> bool:
        """The results of parallel calls, and the user's words behind them, are one turn."""
        answers = run[-1].get("role") == "tool"
        return answers and message.get("role") in ("tool", "user")

    def own(run: list[Message]) -> Message:
        results = [_result_in_words(each) for each in run if each.get("role") == "tool"]
        if results:
            return _merged([_user("\n".join(results)), *run[len(results) :]])
        (message,) = run
        if not (calls := message.get("tool_calls")):
            return message
        texts = [text_of(message.get("content")), *map(_call_in_words, calls)]
        content = "\n".join(text for text in texts if text)
        return {**without(message, "tool_calls"), "content": content}

    messages = [own(run) for run in _runs(chat["messages"], follows)]
    return _listed({**chat, "messages": messages}, _HOW)


def _result_in_words(message: Message) -> str:
    return f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"


def _call_in_words(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": _parsed(function["arguments"])}
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


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def _with_arguments(change: Callable[[Any], Any]) -> Form:
    def changed(call: Message) -> Message:
        function = call["function"]
        arguments = change(function.get("arguments", {}))
        return {**call, "function": {**function, "arguments": arguments}}

    return _of_each(lambda message: _with_calls(message, changed))


_as_objects = _with_arguments(_parsed)


class _Calls:
    """The calls of a conversation so far, each under an id of its own."""

    def __init__(self, named: set[str]) -> None:
        """`named`: the ids of calls that results name."""
        self._named = named
        self._functions: dict[str, str] = {}
        """The function's name of each call."""
        self._by_given: dict[Any, deque[str]] = {}
        """For each of those ids, the calls that have it in the last turn with one."""
        self._unnamed: deque[str] = deque()
        """The calls of the last turn that no result names."""
        self._made = map("call{:05}".format, count(1))  # a client's own ids may look like these

    def added(self, given: list[Message]) -> list[Message]:
        """The calls of a turn."""
        self._by_given |= {call["id"]: deque() for call in given if call.get("id") in self._named}
        self._unnamed = deque()
        calls = []
        for call in given:
            ids = chain([call.get("id")], self._made)
            own = next(each for each in ids if each and each not in self._functions)
            self._functions[own] = call["function"]["name"]
            self._by_given.get(call.get("id"), self._unnamed).append(own)
            calls.append({**call, "id": own})
        return calls

    def answered(self, result: Message) -> Message:
        """A result with its call's id and the function's name; one of no call is as it is."""
        if own_ids := self._by_given.get(result.get("tool_call_id")):
            own = own_ids[0]
            own_ids.rotate(-1)  # the next one's, if several calls have this id
        elif self._unnamed:
            to_it = (id for id in self._unnamed if self._functions[id] == result.get("name"))
            own = next(to_it, self._unnamed[0])
            self._unnamed.remove(own)
        else:
            return result
        return {**result, "tool_call_id": own, "name": self._functions[own]}


def _pairs(messages: list[Message]) -> Iterator[Message]:
    """Each call with an id of its own, each result with its call's id and the function's name.

    A result that names no call is that of the first call of the last turn that no result names, of
    those to the result's function if it names one.
    """
    calls = _Calls({id for each in messages if (id := each.get("tool_call_id"))})
    for message in messages:
        if given := message.get("tool_calls"):
            message = {**message, "tool_calls": calls.added(given)}
        elif message.get("role") == "tool":
            message = calls.answered(message)
        yield message


_paired = _of_messages(_pairs)


@_of_messages
def _in_order(messages: list[Message]) -> Iterator[Message]:
    """Results that follow each other in the order of their calls, those of no call last: most
    templates write no ids, so that the order alone tells the model which result is whose."""
    places: dict[str, int] = {}
    keys: list[tuple[int, int]] = []
    for index, message in enumerate(_pairs(messages)):
        is_result = message.get("role") == "tool"
        begin = keys[-1][0] if is_result and keys else index
        place = places.get(message.get("tool_call_id", ""), sys.maxsize) if is_result else -1
        keys.append((begin, place))
        for call in message.get("tool_calls") or ():
            places[call["id"]] = len(places)
    yield from (messages[index] for index in sorted(range(len(keys)), key=keys.__getitem__))


@_of_messages
def _strays_as_user(messages: list[Message]) -> Iterator[Message]:
    """Results of no call in words, as the user's."""
    ids: set[str] = set()
    for message in _pairs(messages):
        ids |= {call["id"] for call in message.get("tool_calls") or ()}
        is_stray = message.get("role") == "tool" and message.get("tool_call_id") not in ids
        yield _user(_result_in_words(message)) if is_stray else message


@_of_messages
def _one_call_a_turn(messages: list[Message]) -> Iterator[Message]:
    """Parallel calls as turns of their own, each with its result behind it."""

    def follows(run: list[Message], message: Message) -> bool:
        return len(run[0].get("tool_calls") or ()) > 1 and message.get("role") == "tool"

    for first, *results in _runs(_pairs(messages), follows):
        calls = first.get("tool_calls") or ()
        if len(calls) < 2:
            yield first
            continue
        by_id: dict[Any, list[Message]] = {call["id"]: [] for call in calls}
        others: list[Message] = []
        for each in results:
            by_id.get(each.get("tool_call_id"), others).append(each)
        for index, call in enumerate(calls):
            own = {"role": "assistant", "content": ""} if index else first
            yield {**own, "tool_calls": [call]}
            yield from by_id[call["id"]]
        yield from others


_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)


@_of_messages
def _with_short_ids(messages: list[Message]) -> Iterator[Message]:
    """Ids of calls as Mistral has them, of 9 letters and digits."""

    def short(name: str, given: Message) -> Message:
        id = given.get(name) or ""
        is_short = _SHORT_ID.fullmatch(id)
        return {**given, name: id if is_short else sha256(id.encode()).hexdigest()[:9]}

    for message in _pairs(messages):
        is_result = message.get("role") == "tool"
        message = short("tool_call_id", message) if is_result else message
        yield _with_calls(message, partial(short, "id"))


@_of_messages
def _with_the_call(messages: list[Message]) -> list[Message]:
    """Results, and the answer after them, in the message that made the calls."""
    merged: list[Message] = []
    callers: dict[Any, Message] = {}
    for message in map(dict, _pairs(messages)):
        last = merged[-1] if merged else {}
        is_answer = message.get("role") == "assistant" and not message.get("tool_calls")
        if caller := message.get("role") == "tool" and callers.get(message.get("tool_call_id")):
            response = _parsed(text_of(message.get("content")))
            result = {"name": message["name"], "response": response}
            caller.setdefault(_RESULTS, []).append(result)
        elif is_answer and last.get(_RESULTS) and not last.get("content"):
            last["content"] = message.get("content")
        else:
            merged.append(message)
            callers |= {call["id"]: message for call in message.get("tool_calls") or ()}
    return merged


# --- reasoning -----------------------------------------------------------------------------------


@_of_each
def _under_each_name(message: Message) -> Message:
    """Reasoning as `reasoning_content` and as `thinking`, as transformers gives it."""
    reasoning = message.get("reasoning_content")
    return {"thinking": reasoning, **message} if reasoning is not None else message


@_of_each
def _as_thinking_part(message: Message) -> Message:
    """Reasoning as the first part of the content."""
    own = dict(message)
    reasoning = own.pop("reasoning_content", None)
    if reasoning is None:
        return own
    text = text_of(own.get("content"))
    parts = [{"type": "thinking", "thinking": reasoning}]
    return {**own, "content": parts + ([{"type": "text", "text": text}] if text else [])}


# --- which form a template reads -----------------------------------------------------------------


def _message(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


_system, _developer = partial(_message, "system"), partial(_message, "developer")
_user, _assistant = partial(_message, "user"), partial(_message, "assistant")


def _calling(*keys: str, content: Any = "", **more: Any) -> Message:
    calls = [
        {"id": _ID + id, "type": "function", "function": {"name": "f", "arguments": {"key": key}}}
        for id, key in zip("12", keys, strict=False)
    ]
    return _assistant(content, tool_calls=calls, **more)


def _result(content: Any, id: str = "1") -> Message:
    return _message("tool", content, tool_call_id=_ID + id)


def _without_id(message: Message) -> Message:
    return _with_calls(without(message, "tool_call_id"), lambda call: without(call, "id"))


def _tool(name: str = "f") -> dict[str, Any]:
    key = {"type": "string", "description": "A key"}
    parameters = {"type": "object", "properties": {"key": key}, "required": ["key"]}
    return _bare(name, description="A function", parameters=parameters)


def _bare(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def _chat(*messages: Message, tools: Sequence[Any] = ()) -> Chat:
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
    return _MARK in prompt and (_LISTED not in prompt or _CALLED in prompt)


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

    return _Matter(_chat(*messages), (as_it_is, _as_text(which), as_it_is))


_TWO_PARTS = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]

_MATTERS = (
    _Matter(_chat(_user(_MARK)), (as_it_is, _without_none, as_it_is)),
    _Matter(
        _chat(_user("x"), tools=[_bare(_FIRST), _bare(_SECOND, parameters={})]),
        (as_it_is, _complete, as_it_is),
    ),
    _Matter(
        _chat(_developer(_MARK), _user("x")),
        (as_it_is, _with_role("developer", "system")),
        role="developer",
    ),
    _Matter(
        _chat(_system(_FIRST), _system(_MARK), _developer(_SECOND), _user("x")),
        (as_it_is, partial(_one_beginning, of_each_role=True), _one_beginning),
    ),
    _Matter(
        _chat(
            *(_user("x"), _calling("y"), _result(_FIRST)),
            *(_calling("s", "t"), *map(_without_id, (_result("u"), _result("v")))),
            *map(_without_id, (_calling("w", "z"), _result(_MARK), _result(_SECOND))),
        ),
        (as_it_is, _paired, _with_short_ids, as_it_is),
    ),
    _Matter(
        _chat(_user("x"), _calling(_MARK), _result("y")),
        (_as_objects, _with_arguments(_written), _as_objects),
        _arrives_as_json,
    ),
    _Matter(
        _chat(_user("x"), _calling(_CALLED), _result("y"), tools=[_tool(_MARK)]),
        (as_it_is, _as_functions, _listed, _in_words),
        _tells_tools,
    ),
    _Matter(
        _chat(_user("x"), _result(_MARK), _assistant("y"), _user("z")),
        (as_it_is, _strays_as_user, as_it_is),
    ),
    _Matter(
        _chat(_user("x"), _calling(_FIRST, _SECOND), _result("y"), _result("z", "2")),
        (as_it_is, _one_call_a_turn, as_it_is),
    ),
    _Matter(_chat(_system(_MARK), _user("x")), (as_it_is, _into_next)),
    _Matter(
        _chat(_system(_FIRST), _user("x"), _calling("z"), _result(_SECOND)),
        (as_it_is, _into_next_before_others, as_it_is),
    ),
    _Matter(
        _chat(
            *(_user("w"), _assistant("x"), _system(_FIRST), _user("y")),
            *(_assistant("z"), _developer(_SECOND), _user("x")),
        ),
        (as_it_is, _later_as_user, as_it_is),
    ),
    _Matter(
        _chat(_user("x"), _user(_FIRST), _assistant("y"), _assistant(_SECOND), _user("z")),
        (as_it_is, _runs_merged(_is_of_the_turn), as_it_is),
    ),
    _Matter(
        _chat(
            *(_user("x"), _calling(_MARK, content=_FIRST, reasoning_content="r"), _result("y")),
            *(_assistant("z"), _user("w"), _assistant(_SECOND), _calling("v"), _result("u")),
            *(_assistant("t"), _user("s")),
        ),
        (as_it_is, _words_with_calls, _apart_from_calls, _words_with_calls),
        _all_arrive,
    ),
    _Matter(
        _chat(_user("x"), _calling("z"), _result(_MARK)),
        (as_it_is, _with_the_call, as_it_is),
        role="tool",
    ),
    _Matter(
        _chat(_system(_FIRST), _user("x"), _calling("z"), _result(_MARK), _user(_SECOND)),
        (as_it_is, _runs_merged(_is_behind_result), as_it_is),
    ),
    _Matter(
        _chat(_user("x"), _calling("z", reasoning_content=_MARK), _result("y")),
        (_under_each_name, _as_thinking_part, _under_each_name),
    ),
    _Matter(
        _chat(_user(_FIRST), _assistant("x"), _user(_TWO_PARTS[1:])),
        (as_it_is, _all_as_text, _as_parts, _all_as_text),
    ),
    _matter_of_parts("system", _system(_TWO_PARTS), _user("x")),
    _matter_of_parts("developer", _developer(_TWO_PARTS), _user("x")),
    _matter_of_parts("user", _user(_TWO_PARTS)),
    _matter_of_parts("assistant", _user("x"), _assistant(_TWO_PARTS), _user("y")),
    _matter_of_parts(
        *("assistant", _user("x"), _calling("z", content=_TWO_PARTS), _result("y")),
        is_calling=True,
    ),
    _matter_of_parts("tool", _user("x"), _calling("z"), _result(_TWO_PARTS)),
)
"""In the order in which the forms are taken on."""


def forms_of(render: Render) -> tuple[Form, ...]:
    """The forms in which a template reads a chat; they are applied in order."""
    found: list[Form] = [_never_none, _with_role("function", "tool"), _in_order]

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
            other = rendered(_with_role(matter.role, _NO_ROLE)(matter.probe), form)
            if other.lower().replace(_NO_ROLE, matter.role) == prompt.lower():
                continue  # it writes whatever the role is
        if arrives(prompt):
            return form
    return matter.forms[-1]


def without_broken_arguments(chat: Chat) -> tuple[str, Chat] | None:
    """The place of the first call whose arguments are no JSON object, and the chat with empty
    objects in place of such, if there are any. A template that takes this chat has refused the
    other one for its arguments."""

    def is_object(arguments: Any) -> bool:
        return isinstance(_parsed(arguments), Mapping)

    broken = (
        f"[{i}].tool_calls[{j}].function.arguments"
        for i, message in enumerate(chat["messages"])
        for j, call in enumerate(message.get("tool_calls") or ())
        if not is_object(call["function"].get("arguments", {}))
    )
    if (place := next(broken, None)) is None:
        return None
    return place, _with_arguments(lambda given: given if is_object(given) else {})(chat)


def tells_tools_in_words(forms: tuple[Form, ...]) -> bool:
    return _in_words in forms or _listed in forms
