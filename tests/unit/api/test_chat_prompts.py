"""A client's chat as the engine gets it, or the field for which it is refused."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.support import clock
from tests.support.chats import assistant, result, user
from tests.unit.api.round_trips import NAMES, compiled, source
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.reasoning import EFFORT_TOKENS, reasoning_of, template_variables
from worker.api.chat.request import OneTool
from worker.api.dialects.anthropic.schema import MessagesBody, PromptBody, chat_of
from worker.api.dialects.openai.schema import ChatBody
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.dialects.responses.schema import chat_of as chat_of_response
from worker.api.http.state import AppState
from worker.errors import InvalidRequest
from worker.settings import Settings
from worker.wire.work import ChatPrompt

SERVED = SimpleNamespace(has_chat_template=True, chat_template="")
STATE = cast(AppState, SimpleNamespace(served=SERVED, settings=Settings()))


def prompt_of(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    body = ChatBody.model_validate({"model": "m", "messages": messages, **fields})
    return chat_prompt(body.chat(), STATE)


def test_missing_arguments_of_a_call_are_an_empty_object() -> None:
    """Clients send an empty string for a function without parameters, and streams begin with
    one."""

    def chat(**arguments: Any) -> ChatPrompt:
        call = {"id": "call00001", "type": "function", "function": {"name": "now", **arguments}}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        return prompt_of(user("The time?"), calling, result(1, "12:00"))

    for name in NAMES:
        template = compiled(name)
        whole = template.read(chat(arguments="{}")).text()
        for fields in ({"arguments": ""}, {"arguments": None}, {}):
            assert template.read(chat(**fields)).text() == whole, (name, fields)


def test_items_of_a_response_become_a_chat() -> None:
    look = {"name": "look", "parameters": {"type": "object"}}
    body = ResponsesBody.model_validate(
        {
            "instructions": "Be kind.",
            "input": [
                {"role": "developer", "content": "Be brief."},
                user("Look!"),
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                {"role": "assistant", "content": "I look."},
                {"type": "function_call_output", "call_id": "1", "output": "a"},
                assistant("An a."),
                assistant("So there."),
            ],
            "tools": [{"type": "function", **look}],
            "tool_choice": {"type": "function", "name": "look"},
            "text": {"verbosity": "low"},
        }
    )
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be brief."},
        user("Look!"),
        assistant("I look.", reasoning_content="Hm.", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "1", "content": "a"},
        assistant("An a."),
        assistant("So there."),
    ]
    expected: dict[str, Any] = {
        "messages": messages,
        "tools": [{"type": "function", "function": look}],
    }
    expected |= {
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "verbosity": "low",
    }
    chat, same = chat_of_response(body), ChatBody.model_validate(expected).reasoning_chat()
    assert replace(chat_prompt(chat, STATE), field="messages") == chat_prompt(same, STATE)
    assert chat.tool_choice == OneTool("look", "tool_choice.name")


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, **fields}


def test_tools_among_the_items_of_a_response_are_offered() -> None:
    """Codex sends all of its tools as such an item, and repeats it in each turn."""
    again = [function("look", description="New"), function("listen")]
    found = {"type": "namespace", "name": "mail", "tools": [function("send")]}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [function("look")]},
        user("Look!"),
        {"type": "tool_search_call", "call_id": "1", "arguments": {}, "execution": "client"},
        {"type": "tool_search_output", "call_id": "1", "tools": [found]},
        {"type": "mcp_list_tools", "id": "1", "server_label": "a", "tools": [{"name": "b"}]},
        {"type": "additional_tools", "role": "developer", "tools": again},
    ]
    tools = [function("look", description="Old"), function("feel")]
    body = ResponsesBody.model_validate({"input": items, "tools": tools})
    chat = chat_of_response(body)
    descriptions = {tool.name: tool.description for tool in chat.tools}
    assert descriptions == {"feel": None, "look": "New", "mail__send": None, "listen": None}
    assert [message.content for message in chat.messages] == [("Look!",)]
    body = ResponsesBody.model_validate({"input": items[:1]})
    with pytest.raises(InvalidRequest, match="input must have an item besides additional_tools"):
        chat_of_response(body)


def test_a_refusal_is_the_text_of_its_message() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    *_, message = prompt_of(user("Fly!"), refused, user("Why?")).messages[:2]
    assert message == assistant("I cannot.")


@pytest.mark.parametrize(("follows", "n_messages"), [([], 3), ([user("And?")], 3)])
def test_a_reminder_for_one_turn_ends_with_that_turn(
    follows: list[dict[str, Any]], n_messages: int
) -> None:
    reminder = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
    turns = [user("Hi"), reminder, assistant("Hello"), *follows]
    chat = chat_of(PromptBody.model_validate({"messages": turns}))
    assert len(chat.messages) == n_messages
    assert any(message.role == "system" for message in chat.messages) == (not follows)


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]], ids=str)
def test_an_empty_system_prompt_is_no_message(system: Any) -> None:
    chat = chat_of(PromptBody.model_validate({"system": system, "messages": [user("Hi")]}))
    assert [message.role for message in chat.messages] == ["user"]


def changing(kind: str, **tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


def referring(kind: str, name: str) -> dict[str, Any]:
    return changing(kind, type="tool_reference", name=name)


def test_messages_add_and_remove_tools() -> None:
    listen = {"name": "listen", "description": "New", "input_schema": {"type": "object"}}
    turns = [
        user("Look!"),
        referring("tool_addition", "look"),
        referring("tool_removal", "feel"),
        changing("tool_addition", type="tool_definition", definition=listen),
        referring("tool_removal", "look"),
        changing("tool_addition", type="mcp_toolset_reference", server_name="a"),
        assistant("Yes?"),
        referring("tool_addition", "look"),
        user("Listen!"),
    ]
    tools: list[Any] = [{"name": name, "input_schema": {}} for name in ("look", "listen", "feel")]
    chat = chat_of(PromptBody.model_validate({"messages": turns, "tools": tools}))
    assert [(tool.name, tool.description) for tool in chat.tools] == [
        ("look", None),
        ("listen", "New"),
    ]
    assert [message.role for message in chat.messages] == ["user", "assistant", "user"]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content\[0\]\.tool\.name must be"):
        chat_of(PromptBody.model_validate({"messages": turns, "tools": tools[1:]}))


def setting(effort: str) -> dict[str, Any]:
    return {"role": "system", "output_config": {"effort": effort}}


RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "a"}
USE = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
REMINDER = {"type": "text", "text": "Be brief."}


@pytest.mark.parametrize(
    ("follows", "effort"),
    [
        ([], "low"),
        ([setting("high")], "high"),
        ([{"role": "assistant", "content": [USE]}, user([RESULT])], "low"),
        ([assistant("Hello"), user("And?")], "medium"),
        ([assistant("Hello"), user([{"type": "text", "text": "And?"}])], "medium"),
        ([assistant("Hello"), user("And?") | {"output_config": {"effort": "high"}}], "high"),
        ([{"role": "assistant", "content": [USE]}, user([RESULT, REMINDER])], "low"),
    ],
)
def test_a_message_sets_the_effort_of_its_turn(follows: list[dict[str, Any]], effort: str) -> None:
    turns = [user("Hi"), setting("low"), *follows]
    config = {"output_config": {"effort": "medium"}}
    chat = chat_of(PromptBody.model_validate({"messages": turns, **config}))
    assert chat.reasoning.effort == effort
    assert all(message.role != "system" for message in chat.messages)


def test_each_dialect_passes_variables_to_the_template() -> None:
    variables = {"chat_template_kwargs": {"documents": ["a"], "verbosity": "low"}}
    chats = [
        ChatBody.model_validate({"messages": [user("Hi")], **variables}).reasoning_chat(),
        chat_of_response(ResponsesBody.model_validate({"input": "Hi", **variables})),
        chat_of(PromptBody.model_validate({"messages": [user("Hi")], **variables})),
    ]
    for chat in chats:
        assert chat.template_variables == variables["chat_template_kwargs"]


def test_a_call_of_a_custom_tool_has_its_text_as_input() -> None:
    called = {"call_id": "1", "name": "patch", "input": "*** Begin"}
    items = [
        user("Fix it!"),
        {"type": "custom_tool_call", **called},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"},
    ]
    prompt = chat_prompt(chat_of_response(ResponsesBody.model_validate({"input": items})), STATE)
    function = {"name": "patch", "arguments": {"input": "*** Begin"}}
    call = {"id": "1", "type": "function", "function": function}
    result = {"role": "tool", "content": "Done", "tool_call_id": "1"}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert prompt.messages == (user("Fix it!"), turn, result)


def test_a_tool_reference_becomes_the_tools_name() -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("look", "listen")]
    use = {"type": "tool_use", "id": "1", "name": "find", "input": {}}
    results = [{"type": "tool_result", "tool_use_id": "1", "content": found}]
    turns = [user("Find!"), {"role": "assistant", "content": [use]}, user(results)]
    *_, result = chat_of(PromptBody.model_validate({"messages": turns})).messages
    assert result.content == ("look\n\nlisten",)


@pytest.mark.parametrize(
    ("generates_text", "end"), [(True, "; send a raw prompt"), (False, " and generates no text")]
)
def test_only_a_model_that_generates_is_sent_a_raw_prompt(generates_text: bool, end: str) -> None:
    served = SimpleNamespace(
        has_chat_template=False, chat_template="", generates_text=generates_text
    )
    state = cast(AppState, SimpleNamespace(served=served))
    body = ChatBody.model_validate({"messages": [user("Hi.")]})
    with pytest.raises(InvalidRequest, match=f"has no chat template{end}$"):
        chat_prompt(body.chat(), state)


def test_turns_that_few_templates_accept() -> None:
    """Devstral's needs alternating roles and ids of 9 characters, and reads the first part
    unchecked."""
    template = compiled("unsloth-mistral-Devstral-Small-2507")
    use = {"type": "tool_use", "id": "toolu_01AbCdEfGhIjKl", "name": "look", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": use["id"], "content": "a"}
    turns = [
        user("Look!"),
        user("Now."),
        {"role": "assistant", "content": [use]},
        user([answer, {"type": "text", "text": "What is it?"}]),
    ]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = PromptBody.model_validate({"messages": turns, "tools": tools})
    assert "What is it?" in template.read(chat_prompt(chat_of(body), STATE)).text()
    called = {"function": {"name": "look", "arguments": "{}"}, "id": use["id"]}
    calling = {"role": "assistant", "content": [], "tool_calls": [called]}
    seen = {"role": "tool", "tool_call_id": use["id"], "content": "c"}
    assert "look" in template.read(prompt_of(user("a"), calling, seen)).text()


@pytest.mark.parametrize(
    ("operators", "fields", "template", "budget"),
    [
        (None, {}, "", None),
        ("none", {}, "", 0),
        ("none", {"chat_template_kwargs": {"enable_thinking": True}}, "", None),
        ("low", {"chat_template_kwargs": {"enable_thinking": True}}, "", EFFORT_TOKENS["low"]),
        ("low", {}, "", EFFORT_TOKENS["low"]),
        ("low", {}, "{{ reasoning_effort }}", None),
        ("none", {"reasoning_effort": "high"}, "", EFFORT_TOKENS["high"]),
        ("none", {"reasoning_effort": "high"}, "{{ reasoning_effort }}", None),
        ("none", {"reasoning_effort": "unheard-of"}, "", None),
        ("low", {"reasoning_effort": "high", "reasoning_budget": 5}, "", 5),
        ("low", {"reasoning_budget": -1}, "", None),
        ("low", {"enable_thinking": False}, "", 0),
    ],
)
def test_an_effort_is_a_budget_for_templates_that_ignore_efforts(
    operators: str | None, fields: dict[str, Any], template: str, budget: int | None
) -> None:
    served = SimpleNamespace(has_chat_template=True, chat_template=template)
    settings = Settings(reasoning_effort=operators)
    state = cast(AppState, SimpleNamespace(served=served, settings=settings))
    chat = ChatBody.model_validate({"messages": [user("Hi")], **fields}).reasoning_chat()
    assert reasoning_of(chat, state)[2] == budget


@pytest.mark.parametrize(
    ("name", "effort"),
    [
        ("openai-gpt-oss-120b", "low"),
        ("upstage-Solar-Open-100B", "minimal"),
        ("tencent-Hy3", "no_think"),
        ("Cohere2MoE", "none"),
        ("Qwen-Qwen3-0.6B", None),
    ],
)
def test_without_reasoning_a_template_gets_its_least_effort(name: str, effort: str | None) -> None:
    """It got none, and so used its default, such as `medium`, for reasoning that was cut off."""
    served = SimpleNamespace(has_chat_template=True, chat_template=source(name))
    state = cast(AppState, SimpleNamespace(served=served, settings=Settings()))
    body = {"messages": [user("Hi")], "enable_thinking": False}
    chat = ChatBody.model_validate(body).reasoning_chat()
    variables = template_variables(chat, reasoning_of(chat, state), state)
    assert variables.get("reasoning_effort") == effort
    assert variables["enable_thinking"] is False


@pytest.mark.parametrize("role", ["system", "developer", "tool", "function"])
def test_only_a_turn_of_the_assistant_or_the_user_is_continued(role: str) -> None:
    """A template may move other roles' words to the front; all that follows would be cut off."""
    turns = [user("a"), assistant("b")]
    with pytest.raises(InvalidRequest, match=r"messages\[2\]\.role must be assistant or user"):
        prompt_of(*turns, {"role": role, "content": "c"}, continue_final_message=True)
    assert prompt_of(*turns, continue_final_message=True).continue_final_message
    assert prompt_of(turns[0], continue_final_message=True).continue_final_message


def test_many_documents_are_joined_at_once() -> None:
    """Joining them one by one took seconds, because each copied all previous ones."""
    source = {"type": "text", "media_type": "text/plain", "data": "a" * 128}
    content = [{"type": "document", "source": source}] * 16_000
    body = MessagesBody.model_validate(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    )
    began = time.thread_time()
    chat = chat_of(body)
    assert clock.within(time.thread_time() - began, 1)
    assert chat.messages[0].content == ("\n\n".join(["a" * 128] * 16_000),)
