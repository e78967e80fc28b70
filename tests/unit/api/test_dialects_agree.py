"""A request means the same, whichever dialect says it: generated requests, said in each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tests.support.chats import BRIEF, TIME, TWO_CALLS, WEATHER, user
from worker.api.chat.chat_fields import ReasoningChatFields
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.reasoning import Reasoning, reasoning_of
from worker.api.dialects.llama_server.schema import TokenizeBody
from worker.api.dialects.openai.schema import ChatBody, chat_of
from worker.api.http.state import AppState
from worker.errors import InvalidRequest
from worker.settings import Settings
from worker.wire.work import ChatPrompt

TEMPLATE = "{{ reasoning_effort == 'none' }}{{ thinking_budget }}"
SERVED = SimpleNamespace(has_chat_template=True, chat_template=TEMPLATE)
STATE = cast(AppState, SimpleNamespace(served=SERVED, settings=Settings()))
NAMED: dict[str, Any] = {"function": {"name": "get_time"}}
ALLOWED: dict[str, Any] = {"mode": "auto", "tools": [NAMED]}
CHATS = st.fixed_dictionaries(
    {"messages": st.sampled_from([[user("Hi")], [BRIEF, user("Hi")], TWO_CALLS])},
    optional={
        "tools": st.sampled_from([[], [WEATHER], [WEATHER, TIME]]),
        "tool_choice": st.sampled_from(
            ["none", "auto", "required", NAMED]
            + [{"type": "allowed_tools", "allowed_tools": ALLOWED}]
        ),
        "parallel_tool_calls": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "chat_template_kwargs": st.sampled_from([{}, {"a": 1}, {"enable_thinking": True}]),
        "reasoning_effort": st.sampled_from(["none", "high", "odd"]),
        "reasoning_budget": st.integers(-1, 2),
        "reasoning_budget_message": st.just("Enough."),
        "reasoning_format": st.sampled_from(["none", "auto"]),
        "enable_thinking": st.booleans(),
        "verbosity": st.just("low"),
        "response_format": st.just({"type": "json_object"}),
        "max_tokens": st.integers(1, 9),
    },
)


@given(asked=CHATS)
def test_a_chat_is_rendered_by_itself_as_it_is_for_an_answer(asked: dict[str, Any]) -> None:
    def prompt(chat_of: Any) -> ChatPrompt | str:
        try:
            return chat_prompt(chat_of(), STATE)
        except InvalidRequest as refused:
            return refused.message

    answered = prompt(lambda: chat_of(ChatBody.model_validate(asked)))
    for body in (ReasoningChatFields, TokenizeBody):
        assert prompt(lambda body=body: body.model_validate(asked).reasoning_chat()) == answered


# --- reasoning: four places that say something of it --------------------------------------------

SAID_OF: dict[str, st.SearchStrategy[Any]] = {
    "enable_thinking": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "low", "odd"]),
    "thinking_budget": st.sampled_from([-1, 0, 7]),
}
SAID = st.fixed_dictionaries({}, optional=SAID_OF)
WHOLE = st.fixed_dictionaries(SAID_OF)
TEMPLATES = st.sampled_from(["", "{{ reasoning_effort == 'none' }}", "{{ thinking_budget }}"])
Said = dict[str, Any]


def reasoning(template: str, *places: Said) -> tuple[Reasoning, dict[str, Any]]:
    """What comes of the request's fields, its kwargs, the flags and the flags' kwargs."""
    fields, kwargs, flags, flags_kwargs = (*places, {}, {}, {})[:4]
    settings = Settings(
        reasoning=("off", "on")[flags["enable_thinking"]] if "enable_thinking" in flags else "auto",
        reasoning_effort=flags.get("reasoning_effort"),
        reasoning_budget=flags.get("thinking_budget", -1),
        chat_template_kwargs=flags_kwargs,
    )
    served = SimpleNamespace(has_chat_template=True, chat_template=template)
    state = cast(AppState, SimpleNamespace(served=served, settings=settings))
    named = {name.replace("thinking_b", "reasoning_b"): value for name, value in fields.items()}
    asked = {"messages": [user("Hi")], "chat_template_kwargs": kwargs, **named}
    chat = chat_of(ChatBody.model_validate(asked))
    return reasoning_of(chat, state), dict(chat_prompt(chat, state).template_kwargs or {})


@given(template=TEMPLATES, said=SAID)
def test_a_field_and_its_variable_say_the_same_of_reasoning(template: str, said: Said) -> None:
    by_field, by_variable = reasoning(template, said), reasoning(template, {}, said)
    assert by_field[0] == by_variable[0]
    named = by_field[1]
    assert named == {name: by_variable[1][name] for name in named}
    if said.get("thinking_budget", 0) == 0:  # as a flag, -1 says nothing, and more is a limit
        assert reasoning(template, {}, {}, said)[0] == by_field[0]


@given(template=TEMPLATES, is_on=st.booleans(), at=st.integers(0, 3), farther=st.tuples(SAID, SAID))
def test_a_switch_is_obeyed_whatever_is_said_farther_away(
    template: str, is_on: bool, at: int, farther: tuple[Said, Said]
) -> None:
    places = [*([{}] * at), {"enable_thinking": is_on}, *farther]
    found, variables = reasoning(template, *places)
    assert found.is_on is variables["enable_thinking"] is variables["thinking"] is is_on
    assert (found.budget == 0) == (found.effort == "none") == (not is_on)


@given(template=TEMPLATES, nearest=WHOLE, farther=st.tuples(SAID, SAID, SAID))
def test_who_says_all_of_reasoning_is_not_asked_beyond(
    template: str, nearest: Said, farther: tuple[Said, Said, Said]
) -> None:
    assert reasoning(template, nearest, *farther)[0] == reasoning(template, nearest)[0]
