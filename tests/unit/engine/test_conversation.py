"""Whatever a chat says arrives in the prompt, in order, by every template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.chats import SPECIAL, TEMPLATES, calling, result, user
from worker.engine.text.chat_template import ChatTemplate
from worker.engine.text.conversation import _one_call_a_turn
from worker.errors import InvalidRequest
from worker.wire.work import ChatPrompt

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
_WORDS = [f"word{letter}7" for letter in "abcd"]
A, B, C, D = _WORDS


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(number: int, where: str = "up") -> dict[str, Any]:
    function = {"name": "look", "arguments": f'{{"where": "{where}"}}'}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def named(message: dict[str, Any], *ids: str | None) -> dict[str, Any]:
    """A message whose calls, or whose result's call, have these ids."""
    if calls := message.get("tool_calls"):
        both = zip(calls, ids, strict=True)
        return {
            **message,
            "tool_calls": [{**each, "id": id} if id else without(each, "id") for each, id in both],
        }
    return {**message, "tool_call_id": ids[0]} if ids[0] else without(message, "tool_call_id")


def without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


LONG, LONGER = "call_0f1e2d3c4b5a69788796a5b4", "toolu_01AbCdEfGhIjKlMnOpQr"
HI, YES = user("Hi."), said("assistant", "Yes?")
LOOKED = [HI, calling(call(1)), result(1, "A star.")]
CHATS: dict[str, list[dict[str, Any]]] = {
    "two systems": [said("system", A), said("system", B), user(C)],
    "three systems": [said("system", A), said("system", B), said("system", C), user(D)],
    "a system, a developer": [said("system", A), said("developer", B), user(C)],
    "a developer, a system": [said("developer", A), said("system", B), user(C)],
    "two developers": [said("developer", A), said("developer", B), user(C)],
    "a system later": [user(A), YES, said("system", B), user(C), said("assistant", D), HI],
    "a developer later": [user(A), YES, said("developer", B), user(C)],
    "a system first and later": [said("system", A), HI, YES, said("system", B), user(C)],
    "a system last": [user(A), said("assistant", B), said("system", C)],
    "a system behind the user": [user(A), said("system", B), said("assistant", C), user(D)],
    "a system behind a result": [*LOOKED[:2], result(1, A), said("system", B), user(C)],
    "two users": [user(A), user(B)],
    "two assistants": [user(A), said("assistant", B), said("assistant", C), user(D)],
    "parts of the system": [said("system", parts(A, B)), user(C)],
    "parts of a developer": [said("developer", parts(A, B)), user(C)],
    "parts of the user": [user(parts(A, B)), said("assistant", C), user(parts(D))],
    "parts of the assistant": [HI, said("assistant", parts(A, B)), user(C)],
    "parts of a result": [*LOOKED[:2], result(1, ""), YES, HI, calling(call(2)), {
        **result(2, ""), "content": parts(A, B)}],
    "no parts beside a call": [user(A), {**calling(call(1)), "content": []}, result(1, B)],
    "no parts of a result": [user(A), calling(call(1)), {**result(1, ""), "content": []}],
    "words behind a result": [user(A), calling(call(1)), result(1, B), user(C)],
    "words behind two results": [
        user(A), calling(call(1), call(2)), result(1, B), result(2, C), user(D)],
    "an answer behind a result": [*LOOKED[:2], result(1, A), said("assistant", B), user(C)],
    "two calls": [user(A), calling(call(1, B), call(2, C)), result(1, "x"), result(2, "y")],
    "three calls": [
        HI, calling(call(1, A), call(2, B), call(3, C)),
        result(3, "x"), result(1, "y"), result(2, "z"), said("assistant", D), HI],
    "a result of a function": [HI, calling(call(1)), {**result(1, A), "role": "function"}],
    "two results": [user(A), calling(call(1), call(2)), result(1, B), result(2, C)],
    "long ids": [
        user(A), named(calling(call(1), call(2)), LONG, LONGER),
        named(result(1, B), LONG), named(result(2, C), LONGER), said("assistant", D), HI],
}  # fmt: skip
ALSO_WITH_TOOLS = {
    "two systems",
    "a system, a developer",
    "a developer, a system",
    "two developers",
}

NO_CALLS = {
    chat: "it writes no calls at all, and transformers leaves it so"
    for chat in ("two calls", "three calls")
}
EXCEPT: dict[str, Mapping[str, str]] = dict.fromkeys(
    ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"), NO_CALLS
)


_NO_SYSTEM = "it writes the system's words before a last turn of the user's alone, and refuses this"
EXCEPT["mistralai-Mistral-Nemo-Instruct-2407"] = {
    chat: _NO_SYSTEM
    for chat in ("a system behind a result", "words behind a result", "words behind two results")
}


def prompt_of(template: ChatTemplate, messages: Any, *, has_tools: bool) -> str:
    tools = (TOOL,) if has_tools else ()
    return template.read(ChatPrompt(tuple(messages), tools=tools)).text()


def fault(template: ChatTemplate, messages: Any, *, has_tools: bool) -> str | None:
    try:
        text = prompt_of(template, messages, has_tools=has_tools)
    except InvalidRequest as error:
        return str(error)
    if re.search(r"""['"]text['"]: ?['"]word""", text):
        return "a list is printed"
    places = {word: text.find(word) for word in _WORDS if word in str(messages)}
    systems = str([each for each in messages if each["role"] in ("system", "developer")])
    # Some templates put all that the system says first: so their models were trained.
    others = [place for word, place in places.items() if word not in systems]
    return None if -1 not in places.values() and others == sorted(others) else str(places)


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_what_is_said_arrives(name: str) -> None:
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL)
    faults = {}
    for chat, messages in CHATS.items():
        makes_calls = any("tool_calls" in message for message in messages)
        for has_tools in {makes_calls, makes_calls or chat in ALSO_WITH_TOOLS}:
            if found := fault(template, messages, has_tools=has_tools):
                faults[chat] = found
    assert faults.keys() == EXCEPT.get(name, {}).keys(), faults


MISTRAL = TEMPLATES / "Mistral-Small-3.2-24B-Instruct-2506.jinja"


@pytest.mark.parametrize(
    "ids", [(LONG, LONGER), (None, None), ("call00001", LONG), ("", LONG)], ids=str
)
def test_a_result_keeps_the_id_of_its_call(ids: tuple[str | None, ...]) -> None:
    """Mistral's template writes ids, and takes those of 9 letters and digits alone."""
    calls = named(calling(call(1, A), call(2, B)), *ids)
    results = [named(result(2, D), ids[1]), named(result(1, C), ids[0])]
    if not all(ids):
        results.reverse()  # in the calls' order
    template = ChatTemplate(MISTRAL.read_text(), SPECIAL)
    text = prompt_of(template, [HI, calls, *results], has_tools=True)
    called = re.findall(r"\[CALL_ID\](\w{9})\[ARGS\]\{\"where\": \"(\w+)", text)
    answered = dict(re.findall(r"\[TOOL_RESULTS\](\w{9})\[TOOL_CONTENT\](\w+)", text))
    assert [(where, answered[id]) for id, where in called] == [(A, C), (B, D)]


def test_results_without_an_id_follow_the_calls_in_their_order() -> None:
    source = TEMPLATES / "meta-llama-Llama-3.1-8B-Instruct.jinja"
    template = ChatTemplate(source.read_text(), SPECIAL)
    calls = named(calling(call(1, A), call(2, B)), None, None)
    results = [named(result(1, C), None), named(result(2, D), None)]
    text = prompt_of(template, [HI, calls, *results], has_tools=True)
    assert sorted((A, B, C, D), key=text.index) == [A, C, B, D]


def test_a_call_without_a_result_is_told_too() -> None:
    source = TEMPLATES / "meta-llama-Llama-3.1-8B-Instruct.jinja"
    template = ChatTemplate(source.read_text(), SPECIAL)
    messages = [HI, calling(call(1, A), call(2, B)), result(2, C), user(D)]
    text = prompt_of(template, messages, has_tools=True)
    assert sorted((A, B, C, D), key=text.index) == [A, B, C, D]


@pytest.mark.parametrize("ids", [("", ""), (LONG, LONG), (None, None), (LONG, LONGER)])
def test_each_call_of_a_turn_of_its_own_has_its_result(ids: tuple[str | None, str | None]) -> None:
    results = [named(result(1, A), ids[0]), named(result(2, B), ids[1])]
    chat = {"messages": [HI, named(calling(call(1), call(2)), *ids), *results]}
    messages = _one_call_a_turn(chat)["messages"]
    assert [each["role"] for each in messages] == ["user", *["assistant", "tool"] * 2]
    assert [each["content"] for each in messages if each["role"] == "tool"] == [A, B]


def test_words_before_calls_arrive_where_they_did() -> None:
    """Beside a call, some templates would drop them."""
    chat = [HI, said("assistant", A), calling(call(1)), result(1, B)]
    for name in ("Mistral-Small-3.2-24B-Instruct-2506", "meta-llama-Llama-3.1-8B-Instruct"):
        template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL)
        assert fault(template, chat, has_tools=True) is None, name
