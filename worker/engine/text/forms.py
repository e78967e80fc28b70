"""The forms in which templates read a conversation: each brings a chat from clients' form into its
own.

Clients speak one form: OpenAI's. Templates were written for several: one wants a call's arguments
as text, another has no system role. `probes` finds out which forms a template reads. Pure
functions, on intake threads.
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from itertools import chain, count, takewhile
from typing import Any

Chat = dict[str, Any]
"""A template's variables: `messages`, `tools`, `add_generation_prompt` and others."""
Message = dict[str, Any]
Form = Callable[[Chat], Chat]

_RESULTS = "tool_responses"
_SYSTEM = ("system", "developer")
_PARAGRAPH = "\n\n"

LISTED = "You may call functions to help with the request. They are, one JSON object a line:\n"
_HOW = """

To call one, answer with nothing but
<tool_call>
{"name": "the function's name", "arguments": {its arguments as a JSON object}}
</tool_call>
and wait: the result comes in <tool_response></tool_response>. Otherwise answer in words."""


def without(given: Mapping[str, Any], left_out: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != left_out}


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


system, developer = partial(said, "system"), partial(said, "developer")
user, assistant = partial(said, "user"), partial(said, "assistant")


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


never_none = _of_each(lambda m: {**m, "content": m.get("content") or ""})
"""Some templates print what is no content, and read the first part of a list without a look."""


Which = Callable[[Message], bool]
"""Whether a message is one of those that a template reads alike."""


def as_text(which: Which) -> Form:
    return _of_each(lambda m: {**m, "content": text_of(m.get("content"))} if which(m) else m)


all_as_text = as_text(lambda message: True)


@_of_each
def as_parts(message: Message) -> Message:
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


def runs_merged(follows: Follows) -> Form:
    return _of_messages(lambda messages: map(_merged, _runs(messages, follows)))


def is_of_the_turn(run: list[Message], message: Message) -> bool:
    """For templates whose roles must alternate."""
    is_turn = message.get("role") in ("user", "assistant")
    has_calls = run[-1].get("tool_calls") or message.get("tool_calls")
    return is_turn and run[-1].get("role") == message["role"] and not has_calls


def _calls_after_words(run: list[Message], message: Message) -> bool:
    are_its = run[-1].get("role") == message.get("role") == "assistant"
    return are_its and bool(message.get("tool_calls")) and not run[-1].get("tool_calls")


def is_behind_result(run: list[Message], message: Message) -> bool:
    """A user's words: some templates want an answer before them, and take them in the result."""
    return run[0].get("role") == "tool" and message.get("role") == "user"


words_with_calls = runs_merged(_calls_after_words)


@_of_messages
def apart_from_calls(messages: list[Message]) -> Iterator[Message]:
    """The assistant's words in a message before that of the calls beside which they stand."""
    for message in messages:
        if message.get("tool_calls") and text_of(message.get("content")):
            yield assistant(message["content"])
            message = {**message, "content": ""}
        yield message


# --- the system's words, and tools ---------------------------------------------------------------


def _halves(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system's messages before all others, and those."""
    beginning = list(takewhile(lambda m: m.get("role") in _SYSTEM, messages))
    return beginning, messages[len(beginning) :]


def one_beginning(chat: Chat, *, of_each_role: bool = False) -> Chat:
    """All messages of the system and of a developer at the beginning as one; or those of each."""

    def follows(run: list[Message], message: Message) -> bool:
        return not of_each_role or run[0].get("role") == message.get("role")

    beginning, others = _halves(chat["messages"])
    return {**chat, "messages": [*map(_merged, _runs(beginning, follows)), *others]}


@_of_messages
def later_as_user(messages: list[Message]) -> Iterator[Message]:
    """What the system says later as the user's words, before those of a turn that follows."""

    def follows(run: list[Message], message: Message) -> bool:
        return run[-1].get("role") in _SYSTEM and message.get("role") in (*_SYSTEM, "user")

    beginning, others = _halves(messages)
    yield from beginning
    for message in map(_merged, _runs(others, follows)):
        yield {**message, "role": "user"} if message.get("role") in _SYSTEM else message


@_of_messages
def into_next(messages: list[Message]) -> list[Message]:
    """The first message, if it is the system's, at the beginning of the next one."""
    match messages:
        case [{"role": "system"} as system, next_message, *others]:
            text = f"{text_of(system.get('content'))}\n{text_of(next_message.get('content'))}"
            return [{**next_message, "content": text}, *others]
        case [{"role": "system"} as system]:
            return [{**system, "role": "user"}]
    return messages


def with_role(role: str, other: str) -> Form:
    return _of_each(lambda m: {**m, "role": other} if m.get("role") == role else m)


def into_next_before_others(chat: Chat) -> Chat:
    """As `into_next`, unless the user's words come last: some templates write the system's before
    these, and nowhere else."""
    ends_with_user = chat["messages"] and chat["messages"][-1].get("role") == "user"
    return chat if ends_with_user else into_next(chat)


def without_none(chat: Chat) -> Chat:
    return without(chat, "tools") if chat.get("tools") is None else chat


def complete(chat: Chat) -> Chat:
    """Tools with all that a function may leave out."""

    def function(given: Mapping[str, Any]) -> dict[str, Any]:
        schema = given.get("parameters") or {}
        whole = {**given, "parameters": {**schema, "type": "object", "properties": {}, **schema}}
        return {**whole, "description": "", **whole}

    tools = [{**tool, "function": function(tool["function"])} for tool in chat.get("tools") or ()]
    return {**chat, "tools": tools} if tools else chat


def as_functions(chat: Chat) -> Chat:
    """Under the name that they had before they were called tools, as JSON."""
    functions = [tool["function"] for tool in chat.get("tools") or ()]
    text = json.dumps(functions, ensure_ascii=False, indent=4) if functions else ""
    return {**chat, "functions": text}


def listed(chat: Chat, how: str = "") -> Chat:
    """Functions described in words, to a model whose template takes none but writes calls."""
    if not (tools := chat.get("tools")):
        return chat
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = LISTED + "\n".join(lines) + how
    messages = chat["messages"]
    if messages and messages[0].get("role") == "system":
        content = joined(messages[0].get("content"), text, between="\n\n")
        messages = [{**messages[0], "content": content}, *messages[1:]]
    else:
        messages = [{"role": "system", "content": text}, *messages]
    return {**chat, "messages": messages, "tools": None}


def in_words(chat: Chat) -> Chat:
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
            return _merged([user("\n".join(results)), *run[len(results) :]])
        (message,) = run
        if not (calls := message.get("tool_calls")):
            return message
        texts = [text_of(message.get("content")), *map(_call_in_words, calls)]
        content = "\n".join(text for text in texts if text)
        return {**without(message, "tool_calls"), "content": content}

    messages = [own(run) for run in _runs(chat["messages"], follows)]
    return listed({**chat, "messages": messages}, _HOW)


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


def written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def with_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [change(call) for call in calls]} if calls else message


def with_arguments(change: Callable[[Any], Any]) -> Form:
    def changed(call: Message) -> Message:
        function = call["function"]
        arguments = change(function.get("arguments", {}))
        return {**call, "function": {**function, "arguments": arguments}}

    return _of_each(lambda message: with_calls(message, changed))


as_objects = with_arguments(_parsed)


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


paired = _of_messages(_pairs)


@_of_messages
def in_order(messages: list[Message]) -> Iterator[Message]:
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
def strays_as_user(messages: list[Message]) -> Iterator[Message]:
    """Results of no call in words, as the user's."""
    ids: set[str] = set()
    for message in _pairs(messages):
        ids |= {call["id"] for call in message.get("tool_calls") or ()}
        is_stray = message.get("role") == "tool" and message.get("tool_call_id") not in ids
        yield user(_result_in_words(message)) if is_stray else message


@_of_messages
def one_call_a_turn(messages: list[Message]) -> Iterator[Message]:
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
def with_short_ids(messages: list[Message]) -> Iterator[Message]:
    """Ids of calls as Mistral has them, of 9 letters and digits."""

    def short(name: str, given: Message) -> Message:
        id = given.get(name) or ""
        is_short = _SHORT_ID.fullmatch(id)
        return {**given, name: id if is_short else sha256(id.encode()).hexdigest()[:9]}

    for message in _pairs(messages):
        is_result = message.get("role") == "tool"
        message = short("tool_call_id", message) if is_result else message
        yield with_calls(message, partial(short, "id"))


@_of_messages
def with_the_call(messages: list[Message]) -> list[Message]:
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
def under_each_name(message: Message) -> Message:
    """Reasoning as `reasoning_content` and as `thinking`, as transformers gives it."""
    reasoning = message.get("reasoning_content")
    return {"thinking": reasoning, **message} if reasoning is not None else message


@_of_each
def as_thinking_part(message: Message) -> Message:
    """Reasoning as the first part of the content."""
    own = dict(message)
    reasoning = own.pop("reasoning_content", None)
    if reasoning is None:
        return own
    text = text_of(own.get("content"))
    parts = [{"type": "thinking", "thinking": reasoning}]
    return {**own, "content": parts + ([{"type": "text", "text": text}] if text else [])}


def broken_arguments(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """The place of the first call whose arguments are no JSON object, for which some templates
    refuse a chat."""
    places = (
        f"[{i}].tool_calls[{j}].function.arguments"
        for i, message in enumerate(messages)
        for j, call in enumerate(message.get("tool_calls") or ())
        if not isinstance(_parsed(call["function"].get("arguments", {})), Mapping)
    )
    return next(places, None)
