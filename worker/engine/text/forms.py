"""Converts chats from the form that clients send into the forms that templates read.

Clients send one form: OpenAI's. Templates were written for several: one wants a call's arguments as
text, another has no system role. Each `Form` is one conversion, and `probes` finds out which ones a
template needs. Pure functions, on intake threads.
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

_TOOL_RESPONSES = "tool_responses"
_SYSTEM = ("system", "developer")
_PARAGRAPH = "\n\n"

LISTED = "You may call functions to help with the request. They are, one JSON object a line:\n"
_HOW_TO_CALL = """

To call one, answer with nothing but
<tool_call>
{"name": "the function's name", "arguments": {its arguments as a JSON object}}
</tool_call>
and wait: the result comes in <tool_response></tool_response>. Otherwise answer in words."""


def without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def message_of(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


system, developer = partial(message_of, "system"), partial(message_of, "developer")
user, assistant = partial(message_of, "user"), partial(message_of, "assistant")


def unchanged(chat: Chat) -> Chat:
    return chat


def _of_messages(change: Callable[[list[Message]], Iterable[Message]]) -> Form:
    """A form that changes the messages, and nothing else."""
    return lambda chat: {**chat, "messages": [*change(chat["messages"])]}


def _of_each(change: Callable[[Message], Message]) -> Form:
    return _of_messages(partial(map, change))


# --- content -----------------------------------------------------------------------------------


def text_of(content: Any) -> str:
    """The text of a message's content: parts are joined by line breaks, and `None` is empty."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text") or "") for part in content)


def appended(content: Any, text: str, *, between: str = "\n") -> Any:
    """The content with `text` appended; a list of parts stays one."""
    if content is None or isinstance(content, str):
        return f"{content}{between}{text}" if content else text
    *others, last = content or [{"type": "text"}]
    return [*others, {**last, "text": appended(last.get("text"), text, between=between)}]


never_none = _of_each(lambda m: {**m, "content": m.get("content") or ""})
"""Some templates print `None` as text, or index the first part of a list that may be empty."""


def as_text(selects: Callable[[Message], bool]) -> Form:
    return _of_each(lambda m: {**m, "content": text_of(m.get("content"))} if selects(m) else m)


all_as_text = as_text(lambda message: True)


@_of_each
def as_parts(message: Message) -> Message:
    content = message["content"]
    is_text = isinstance(content, str)
    return {**message, "content": [{"type": "text", "text": content}]} if is_text else message


# --- messages that follow each other -------------------------------------------------------------


Follows = Callable[[list[Message], Message], bool]
"""Whether a message belongs to the run of messages before it."""


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
    """Messages merged into the first: their texts become paragraphs, and all calls are kept."""
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


def continues_turn(run: list[Message], message: Message) -> bool:
    """Whether a message without calls continues a turn. Some templates need roles to alternate."""
    is_turn = message.get("role") in ("user", "assistant")
    has_calls = run[-1].get("tool_calls") or message.get("tool_calls")
    return is_turn and run[-1].get("role") == message["role"] and not has_calls


def _are_calls_after_text(run: list[Message], message: Message) -> bool:
    are_its = run[-1].get("role") == message.get("role") == "assistant"
    return are_its and bool(message.get("tool_calls")) and not run[-1].get("tool_calls")


def follows_result(run: list[Message], message: Message) -> bool:
    """Whether a user's message follows a result: some templates require an answer between the two,
    but read the user's text as part of the result."""
    return run[0].get("role") == "tool" and message.get("role") == "user"


text_with_calls = runs_merged(_are_calls_after_text)


@_of_messages
def apart_from_calls(messages: list[Message]) -> Iterator[Message]:
    """Move the assistant's text out of a message with calls, into one of its own before it."""
    for message in messages:
        if message.get("tool_calls") and text_of(message.get("content")):
            yield assistant(message["content"])
            message = {**message, "content": ""}
        yield message


# --- the system's words, and tools ---------------------------------------------------------------


def _split(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The leading messages of the system and a developer, and all others."""
    beginning = list(takewhile(lambda m: m.get("role") in _SYSTEM, messages))
    return beginning, messages[len(beginning) :]


def merged_beginning(chat: Chat, *, of_each_role: bool = False) -> Chat:
    """Merge the leading messages of the system and a developer; with `of_each_role`, only
    neighbours with the same role."""

    def follows(run: list[Message], message: Message) -> bool:
        return not of_each_role or run[0].get("role") == message.get("role")

    beginning, others = _split(chat["messages"])
    return {**chat, "messages": [*map(_merged, _runs(beginning, follows)), *others]}


@_of_messages
def later_as_user(messages: list[Message]) -> Iterator[Message]:
    """Turn later system and developer messages into a user's, merged with the user's next turn."""

    def follows(run: list[Message], message: Message) -> bool:
        return run[-1].get("role") in _SYSTEM and message.get("role") in (*_SYSTEM, "user")

    beginning, others = _split(messages)
    yield from beginning
    for message in map(_merged, _runs(others, follows)):
        yield {**message, "role": "user"} if message.get("role") in _SYSTEM else message


@_of_messages
def into_next(messages: list[Message]) -> list[Message]:
    """Move a leading system message to the start of the next one; alone, it becomes a user's."""
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
    """As `into_next`, unless the last message is the user's: some templates write the system's text
    before that one, and nowhere else."""
    ends_with_user = chat["messages"] and chat["messages"][-1].get("role") == "user"
    return chat if ends_with_user else into_next(chat)


def without_none(chat: Chat) -> Chat:
    return without(chat, "tools") if chat.get("tools") is None else chat


def complete(chat: Chat) -> Chat:
    """Add to tools the fields that a client may leave out."""

    def completed(function: Mapping[str, Any]) -> dict[str, Any]:
        schema = function.get("parameters") or {}
        whole = {**function, "parameters": {**schema, "type": "object", "properties": {}, **schema}}
        return {**whole, "description": "", **whole}

    tools = [{**tool, "function": completed(tool["function"])} for tool in chat.get("tools") or ()]
    return {**chat, "tools": tools} if tools else chat


def as_functions(chat: Chat) -> Chat:
    """Tools as a JSON text in `functions`, the variable that templates read before `tools`."""
    functions = [tool["function"] for tool in chat.get("tools") or ()]
    text = json.dumps(functions, ensure_ascii=False, indent=4) if functions else ""
    return {**chat, "functions": text}


def listed(chat: Chat, how: str = "") -> Chat:
    """Describe the tools in a system message, for templates that write calls but take no tools."""
    if not (tools := chat.get("tools")):
        return chat
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = LISTED + "\n".join(lines) + how
    messages = chat["messages"]
    if messages and messages[0].get("role") == "system":
        content = appended(messages[0].get("content"), text, between="\n\n")
        messages = [{**messages[0], "content": content}, *messages[1:]]
    else:
        messages = [{"role": "system", "content": text}, *messages]
    return {**chat, "messages": messages, "tools": None}


def in_words(chat: Chat) -> Chat:
    """Describe the tools, and how to call them in the most common format, for templates that know
    neither tools nor calls.

    Calls in earlier messages, and their results, become text in that format.
    """

    def follows(run: list[Message], message: Message) -> bool:
        """The results of parallel calls, and a user's message after them, are one turn."""
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
    return listed({**chat, "messages": messages}, _HOW_TO_CALL)


def _result_in_words(message: Message) -> str:
    return f"<tool_response>\n{text_of(message.get('content'))}\n</tool_response>"


def _call_in_words(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {"name": function["name"], "arguments": _parsed(function["arguments"])}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


# --- calls and their results ---------------------------------------------------------------------


def _parsed(arguments: Any) -> Any:
    """Arguments as an object; text that is not a JSON object is returned unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


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
    """The calls of a conversation so far, each with a unique id."""

    def __init__(self, referenced: set[str]) -> None:
        """`referenced`: the call ids that results have."""
        self._referenced = referenced
        self._functions: dict[str, str] = {}
        """The name of the function that each call is to, by the call's unique id."""
        self._by_id: dict[Any, deque[str]] = {}
        """For each referenced id, the unique ids of its calls, in the last turn that has any."""
        self._unreferenced: deque[str] = deque()
        """The unique ids of the calls of the last turn that no result refers to."""
        self._made = map("call{:05}".format, count(1))  # a client's own ids may look like these

    def add(self, calls: list[Message]) -> list[Message]:
        """Add the calls of a turn, and return them with unique ids."""
        self._by_id |= {id: deque() for call in calls if (id := call.get("id")) in self._referenced}
        self._unreferenced = deque()
        added = []
        for call in calls:
            ids = chain([call.get("id")], self._made)
            own = next(each for each in ids if each and each not in self._functions)
            self._functions[own] = call["function"]["name"]
            self._by_id.get(call.get("id"), self._unreferenced).append(own)
            added.append({**call, "id": own})
        return added

    def resolve(self, result: Message) -> Message:
        """A result with its call's unique id and the function's name; a result without a call is
        returned unchanged."""
        if own_ids := self._by_id.get(result.get("tool_call_id")):
            own = own_ids[0]
            own_ids.rotate(-1)  # if several calls have this id, the next result is the next call's
        elif self._unreferenced:
            same = (id for id in self._unreferenced if self._functions[id] == result.get("name"))
            own = next(same, self._unreferenced[0])
            self._unreferenced.remove(own)
        else:
            return result
        return {**result, "tool_call_id": own, "name": self._functions[own]}


def _pairs(messages: list[Message]) -> Iterator[Message]:
    """Give each call a unique id, and each result its call's id and the function's name.

    A result without a known call id belongs to the first call of the last turn that no result
    refers to; calls to the function that the result names are preferred.
    """
    calls = _Calls({id for each in messages if (id := each.get("tool_call_id"))})
    for message in messages:
        if made := message.get("tool_calls"):
            message = {**message, "tool_calls": calls.add(made)}
        elif message.get("role") == "tool":
            message = calls.resolve(message)
        yield message


paired = _of_messages(_pairs)


@_of_messages
def in_order(messages: list[Message]) -> Iterator[Message]:
    """Sort consecutive results in the order of their calls, those without a call last: most
    templates write no ids, so only the order shows the model which call a result belongs to."""
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
    """Turn results without a call into text of the user's."""
    ids: set[str] = set()
    for message in _pairs(messages):
        ids |= {call["id"] for call in message.get("tool_calls") or ()}
        is_stray = message.get("role") == "tool" and message.get("tool_call_id") not in ids
        yield user(_result_in_words(message)) if is_stray else message


@_of_messages
def one_call_a_turn(messages: list[Message]) -> Iterator[Message]:
    """Split parallel calls into turns of their own, each followed by its result."""

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
    """Give calls ids as Mistral has them: 9 letters and digits."""

    def short(key: str, item: Message) -> Message:
        id = item.get(key) or ""
        is_short = _SHORT_ID.fullmatch(id)
        return {**item, key: id if is_short else sha256(id.encode()).hexdigest()[:9]}

    for message in _pairs(messages):
        is_result = message.get("role") == "tool"
        message = short("tool_call_id", message) if is_result else message
        yield with_calls(message, partial(short, "id"))


@_of_messages
def with_the_call(messages: list[Message]) -> list[Message]:
    """Move results, and the answer after them, into the message that made the calls."""
    merged: list[Message] = []
    callers: dict[Any, Message] = {}
    for message in map(dict, _pairs(messages)):
        last = merged[-1] if merged else {}
        is_answer = message.get("role") == "assistant" and not message.get("tool_calls")
        if caller := message.get("role") == "tool" and callers.get(message.get("tool_call_id")):
            response = _parsed(text_of(message.get("content")))
            result = {"name": message["name"], "response": response}
            caller.setdefault(_TOOL_RESPONSES, []).append(result)
        elif is_answer and last.get(_TOOL_RESPONSES) and not last.get("content"):
            last["content"] = message.get("content")
        else:
            merged.append(message)
            callers |= {call["id"]: message for call in message.get("tool_calls") or ()}
    return merged


# --- reasoning -----------------------------------------------------------------------------------


@_of_each
def under_each_name(message: Message) -> Message:
    """Reasoning as `reasoning_content` and as `thinking`, as transformers passes it."""
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
    """The place of the first call whose arguments are not a JSON object, which makes some templates
    refuse a chat; `None` if there is none."""
    places = (
        f"[{i}].tool_calls[{j}].function.arguments"
        for i, message in enumerate(messages)
        for j, call in enumerate(message.get("tool_calls") or ())
        if not isinstance(_parsed(call["function"].get("arguments", {})), Mapping)
    )
    return next(places, None)
