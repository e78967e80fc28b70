"""All parts of a chat arrive in the prompt, in order, with every template."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from itertools import count, pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import clock
from tests.support.chats import SPECIAL, TEMPLATES, calling, result, user
from worker.engine.text import chat_template, forms
from worker.engine.text.chat_template import ChatTemplate
from worker.engine.text.forms import assistant, developer, message_of, system, without
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


def call(number: int, where: str = "up") -> dict[str, Any]:
    function = {"name": "look", "arguments": f'{{"where": "{where}"}}'}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def named(message: dict[str, Any], *ids: str | None) -> dict[str, Any]:
    """Return a message whose calls, or whose result's call, have these ids."""
    if calls := message.get("tool_calls"):
        both = zip(calls, ids, strict=True)
        return {
            **message,
            "tool_calls": [{**each, "id": id} if id else without(each, "id") for each, id in both],
        }
    return {**message, "tool_call_id": ids[0]} if ids[0] else without(message, "tool_call_id")


LONG, LONGER = "call_0f1e2d3c4b5a69788796a5b4", "toolu_01AbCdEfGhIjKlMnOpQr"
HI, YES = user("Hi."), assistant("Yes?")
LOOKED = [HI, calling(call(1)), result(1, "A star.")]
CHATS: dict[str, list[dict[str, Any]]] = {
    "two systems": [system(A), system(B), user(C)],
    "three systems": [system(A), system(B), system(C), user(D)],
    "a system, a developer": [system(A), developer(B), user(C)],
    "a developer, a system": [developer(A), system(B), user(C)],
    "two developers": [developer(A), developer(B), user(C)],
    "a system later": [user(A), YES, system(B), user(C), assistant(D), HI],
    "a developer later": [user(A), YES, developer(B), user(C)],
    "a system first and later": [system(A), HI, YES, system(B), user(C)],
    "a system last": [user(A), assistant(B), system(C)],
    "a system behind the user": [user(A), system(B), assistant(C), user(D)],
    "a system behind a result": [*LOOKED[:2], result(1, A), system(B), user(C)],
    "two users": [user(A), user(B)],
    "two assistants": [user(A), assistant(B), assistant(C), user(D)],
    "parts of the system": [system(parts(A, B)), user(C)],
    "parts of a developer": [developer(parts(A, B)), user(C)],
    "parts of the user": [user(parts(A, B)), assistant(C), user(parts(D))],
    "parts of the assistant": [HI, assistant(parts(A, B)), user(C)],
    "parts of a result": [*LOOKED[:2], result(1, ""), YES, HI, calling(call(2)), {
        **result(2, ""), "content": parts(A, B)}],
    "no parts beside a call": [user(A), {**calling(call(1)), "content": []}, result(1, B)],
    "no parts of a result": [user(A), calling(call(1)), {**result(1, ""), "content": []}],
    "words behind a result": [user(A), calling(call(1)), result(1, B), user(C)],
    "words behind two results": [
        user(A), calling(call(1), call(2)), result(1, B), result(2, C), user(D)],
    "an answer behind a result": [*LOOKED[:2], result(1, A), assistant(B), user(C)],
    "two calls": [user(A), calling(call(1, B), call(2, C)), result(1, "x"), result(2, "y")],
    "three calls": [
        HI, calling(call(1, A), call(2, B), call(3, C)),
        result(3, "x"), result(1, "y"), result(2, "z"), assistant(D), HI],
    "a result of a function": [HI, calling(call(1)), {**result(1, A), "role": "function"}],
    "two results": [user(A), calling(call(1), call(2)), result(1, B), result(2, C)],
    "long ids": [
        user(A), named(calling(call(1), call(2)), LONG, LONGER),
        named(result(1, B), LONG), named(result(2, C), LONGER), assistant(D), HI],
}  # fmt: skip
CHATS |= {
    "calls in two messages": [
        user(A), calling(call(1, B)), calling(call(2, C)), result(1, "x"), result(2, D)],
    "a result without an id": [user(A), calling(call(1)), named(result(1, B), None)],
    "no ids in two turns": [
        user(A),
        *(named(calling(call(1), call(2)), None, None), named(result(1, "x"), None)),
        *(named(result(2, B), None), named(calling(call(1), call(2)), None, None)),
        *(named(result(1, C), None), named(result(2, D), None))],
    "an id in two turns": [
        *(user(A), calling(call(1), call(2)), result(1, "x"), result(2, "y")),
        *(calling(call(2), call(1)), result(2, B), result(1, C))],
    "two results of one call": [user(A), calling(call(1)), result(1, B), result(1, C)],
    "a result of no call": [user(A), named(result(1, B), LONG), assistant(C), user(D)],
}  # fmt: skip
ALSO_WITH_TOOLS = {
    "two systems",
    "a system, a developer",
    "a developer, a system",
    "two developers",
}

NO_CALLS = {
    chat: "it writes no calls at all, and transformers leaves it so"
    for chat in ("two calls", "three calls", "calls in two messages")
}
EXCEPT: dict[str, Mapping[str, str]] = dict.fromkeys(
    ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"), NO_CALLS
)


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
    # Some templates put all system messages first, as in their models' training.
    others = [place for word, place in places.items() if word not in systems]
    return None if -1 not in places.values() and others == sorted(others) else str(places)


@pytest.fixture(scope="module", params=sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def name(request: pytest.FixtureRequest) -> str:
    """Template names; all tests of one run together, because compiling it takes longer."""
    return str(request.param)


@pytest.fixture(scope="module")
def template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL)


def test_all_messages_arrive_in_order(name: str, template: ChatTemplate) -> None:
    faults = {}
    for chat, messages in CHATS.items():
        makes_calls = any("tool_calls" in message for message in messages)
        for has_tools in {makes_calls, makes_calls or chat in ALSO_WITH_TOOLS}:
            if found := fault(template, messages, has_tools=has_tools):
                faults[chat] = found
    assert faults.keys() == EXCEPT.get(name, {}).keys(), faults


# --- tool loops --------------------------------------------------------------------

STEPS = ("call", "words, call", "words beside a call", "words beside two calls", "thought of")
OWN_ORDER = {
    "google-gemma-4-31B-it": "it writes words behind the calls beside which they stand",
    "google-gemma-4-31B-it-interleaved": "it writes words behind calls and their results",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "it writes words behind calls",
}
WORDLESS = {"Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"}
"""Templates that drop text beside a call and refuse text before it: assistant and user must
alternate."""


def without_words_of_calls(chat: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message, after in pairwise([*chat, {}]):
        if "tool_calls" in message:
            yield {**message, "content": None}
        elif "tool_calls" not in after or message["role"] != "assistant":
            yield message


def step(kind: str, n: int, words: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One turn of a tool loop."""
    calls = [{**call(1), "id": f"call_{n:024}"}]
    if kind == "words beside two calls":
        calls.append({**call(1), "id": f"toolu_{n:024}"})
    if kind == "words, call":
        yield assistant(next(words))
    thoughts = {"reasoning_content": "Hm."} if kind == "thought of" else {}
    content = None if kind in ("call", "words, call") else next(words)
    yield {**calling(*calls, **thoughts), "content": content}
    for each in calls:
        yield named(result(1, next(words)), each["id"])


def loops() -> Iterator[list[dict[str, Any]]]:
    """Yield each step, and each two in a row, with each end; every other pair with a system
    message."""
    for ends, n_steps in product(("result", "answer", "prefill"), (1, 2)):
        for number, kinds in enumerate(product(STEPS, repeat=n_steps)):
            for has_system in (False, True) if n_steps == 1 else (number % 2 == 0,):
                words = (f"word{n}7" for n in count(10))
                begin = [system(next(words))] if has_system else []
                chat = [*begin, user(next(words))]
                for n, kind in enumerate(kinds):
                    chat += step(kind, n, words)
                if ends != "result":
                    chat.append(assistant(next(words)))
                if ends == "answer":
                    chat.append(user(next(words)))
                yield chat


def test_texts_of_a_tool_loop_arrive_once_and_in_order(name: str, template: ChatTemplate) -> None:
    for chat in loops():
        is_prefill = chat[-1]["role"] == "assistant"
        prompt = ChatPrompt(
            tuple(chat),
            tools=(TOOL,),
            add_generation_prompt=not is_prefill,
            continue_final_message=is_prefill,
        )
        text = template.read(prompt).text()
        if name in WORDLESS:
            chat = [*without_words_of_calls(chat)]
        words = re.findall(r"word\d\d7", str(chat))
        arrived = re.findall(r"word\d\d7", text)
        assert sorted(arrived) == words, (chat, text)
        if chat[0]["role"] == "system":  # Mistral's writes it before the user's last message
            arrived.remove(words.pop(0))
        assert arrived == words or name in OWN_ORDER, (chat, text)


def test_arguments_that_are_not_json_arrive_or_are_named(name: str, template: ChatTemplate) -> None:
    for written in (f'{{"where": "{A}', f'["{A}"]', f'"{A}"', A):
        broken = call(2)
        broken["function"]["arguments"] = written
        chat = [HI, calling(call(1), broken), result(1, "x"), result(2, "y"), YES, HI]
        try:
            text = prompt_of(template, chat, has_tools=True)
        except InvalidRequest as error:
            assert str(error).startswith("messages[1].tool_calls[1].function.arguments: ")
            assert error.details["field"] == "messages[1].tool_calls[1].function.arguments"
        else:
            assert A in text or EXCEPT.get(name) is NO_CALLS


def test_a_function_needs_only_a_name(template: ChatTemplate) -> None:
    leaving_out: tuple[dict[str, Any], ...] = (
        {},
        {"description": "What it does"},
        {"parameters": {}},
        {"parameters": {"type": "object"}},
        {"description": "What it does", "parameters": {"properties": {}}},
    )
    for more in leaving_out:
        tool = {"type": "function", "function": {"name": A, **more}}
        text = template.read(ChatPrompt((HI,), tools=(tool,))).text()
        assert A in text and str(more.get("description", "")) in text


def test_missing_fields_of_a_function_are_added_in_one_order() -> None:
    """A set's order differs in each process, so that prompts would have different prefixes."""
    tool = {"type": "function", "function": {"name": A}}
    [whole] = forms.complete({"messages": [], "tools": [tool]})["tools"]
    parameters = {"type": "object", "properties": {}}
    wanted = {"name": A, "parameters": parameters, "description": ""}
    assert json.dumps(whole["function"]) == json.dumps(wanted)


def test_a_long_conversation_is_not_refused(
    template: ChatTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two million characters in a hundred messages."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 60)
    messages = [message_of(role, "word " * 4000) for role in ("user", "assistant") * 50]
    text = template.read(ChatPrompt((*messages, user("?")))).text()
    assert text.count("word") == 400_000


# --- pairs of calls and results -------------------------------------------------------------------

MISTRAL = TEMPLATES / "Mistral-Small-3.2-24B-Instruct-2506.jinja"


@pytest.mark.parametrize(
    "ids", [(LONG, LONGER), (None, None), ("call00001", LONG), ("", LONG)], ids=str
)
def test_a_result_keeps_the_id_of_its_call(ids: tuple[str | None, ...]) -> None:
    """Mistral's template writes ids, and accepts only those of 9 letters and digits."""
    calls = named(calling(call(1, A), call(2, B)), *ids)
    results = [named(result(2, D), ids[1]), named(result(1, C), ids[0])]
    if not all(ids):
        results.reverse()  # in the order of the calls
    template = ChatTemplate(MISTRAL.read_text(), SPECIAL)
    text = prompt_of(template, [HI, calls, *results], has_tools=True)
    called = re.findall(r"\[CALL_ID\](\w{9})\[ARGS\]\{\"where\": \"(\w+)", text)
    answered = dict(re.findall(r"\[TOOL_RESULTS\](\w{9})\[TOOL_CONTENT\](\w+)", text))
    assert [(where, answered[id]) for id, where in called] == [(A, C), (B, D)]


def test_a_call_without_a_result_arrives_too() -> None:
    source = TEMPLATES / "meta-llama-Llama-3.1-8B-Instruct.jinja"
    template = ChatTemplate(source.read_text(), SPECIAL)
    messages = [HI, calling(call(1, A), call(2, B)), result(2, C), user(D)]
    text = prompt_of(template, messages, has_tools=True)
    assert sorted((A, B, C, D), key=text.index) == [A, B, C, D]


@pytest.mark.parametrize("named_by", ["id", "function"])
def test_results_come_in_the_order_of_their_calls(
    name: str, template: ChatTemplate, named_by: str
) -> None:
    """Most templates write no ids, and a client that runs calls in parallel may send any order."""
    asks = [call(n) | {"function": {"name": f, "arguments": "{}"}} for n, f in ((1, "a"), (2, "b"))]
    answers = [result(2, C), result(1, B)]
    if named_by == "function":
        asks = [without(each, "id") for each in asks]
        answers = [named(each, None) | {"name": f} for each, f in zip(answers, "ba", strict=True)]
    chat = [user(A), calling(*asks), *answers, assistant(D), HI]
    text = prompt_of(template, chat, has_tools=True)
    places = [text.find(word) for word in (A, B, C, D)]
    assert places == sorted(places) and places[0] >= 0, text


@pytest.mark.parametrize("ids", [("", ""), (LONG, LONG), (None, None), (LONG, LONGER)])
def test_calls_that_are_split_into_turns_keep_their_results(
    ids: tuple[str | None, str | None],
) -> None:
    results = [named(result(1, A), ids[0]), named(result(2, B), ids[1])]
    chat = {"messages": [HI, named(calling(call(1), call(2)), *ids), *results]}
    messages = forms.one_call_a_turn(chat)["messages"]
    assert [each["role"] for each in messages] == ["user", *["assistant", "tool"] * 2]
    assert [each["content"] for each in messages if each["role"] == "tool"] == [A, B]


@pytest.mark.parametrize(
    "ids, answered, own_ids",
    [
        ((LONG, LONGER), (LONGER, LONG), [LONGER, LONG]),
        ((LONG, LONGER), (None, LONG), [LONGER, LONG]),
        ((LONG, LONGER), ("other", LONGER), [LONG, LONGER]),
        ((None, None), (None, None), ["call00001", "call00002"]),
        ((LONG, LONG), (LONG, LONG), [LONG, "call00001"]),
        ((LONG, None), (None, LONG), ["call00001", LONG]),
        ((LONG, LONGER), (LONG, LONG), [LONG, LONG]),
        (("call00001", None), ("call00001", None), ["call00001", "call00002"]),
    ],
)
def test_each_result_has_the_id_and_the_name_of_its_call(
    ids: tuple[str | None, ...], answered: tuple[str | None, ...], own_ids: list[str]
) -> None:
    calls = named(calling(call(1), call(2)), *ids)
    results = [named(result(1, A), answered[0]), HI, named(result(1, B), answered[1])]
    *_, first, _, second = forms.paired({"messages": [HI, calls, *results]})["messages"]
    assert [first["tool_call_id"], second["tool_call_id"]] == own_ids
    assert first["name"] == second["name"] == "look"


def test_large_chats_are_read_quickly() -> None:
    many = [{**call(1), "id": f"call_{n:030}"} for n in range(256)]
    strays = [named(result(1, "r"), f"other_{n:030}") for n in range(3800)]
    words = "x" * 960
    for name, chat in {
        "meta-llama-Llama-3.1-8B-Instruct": [HI, calling(*many), *strays],
        "mistralai-Mistral-Nemo-Instruct-2407": [HI, calling(*many), *strays],
        "google-gemma-2-2b-it": [user(words)] * 4096,
        "Qwen3.5-4B": [HI, YES, *[system(words)] * 4090],
        "microsoft-Phi-3.5-mini-instruct": [HI, *[result(1, words)] * 4090],
    }.items():
        template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), SPECIAL)
        began = time.thread_time()
        template.read(ChatPrompt(tuple(chat), tools=(TOOL,)))
        assert clock.within(time.thread_time() - began, 0.4), name


def test_a_long_chat_has_more_time_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    template = ChatTemplate("{{ messages }}", SPECIAL)

    def rendered(chat: Any, seconds: float) -> str:
        limits.append(seconds)
        return ""

    monkeypatch.setattr(template, "rendered", rendered)
    for n_messages in (1, 1600, 4096):
        template.read(ChatPrompt((HI,) * n_messages)).text()
    assert limits[0] < 2.1 and 6 < limits[1] < limits[2] < 20


@given(
    st.lists(
        st.lists(st.sampled_from([None, LONG, "call00001", "call00002", "call00003"]), min_size=1),
        max_size=4,
    )
)
def test_every_call_has_a_unique_id_whatever_clients_send(
    turns: list[list[str | None]],
) -> None:
    messages: list[dict[str, Any]] = []
    for ids in turns:
        messages.append(named(calling(*map(call, range(len(ids)))), *ids))
        messages += [named(result(1, A), id) for id in ids]
    chat = forms.paired({"messages": messages})
    assert forms.paired(chat) == chat
    messages = chat["messages"]
    called = [each["id"] for message in messages for each in message.get("tool_calls", ())]
    assert [each["tool_call_id"] for each in messages if each["role"] == "tool"] == called
    assert len(set(called)) == len(called)
