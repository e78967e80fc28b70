"""A request means the same, whichever dialect says it: generated requests, said in each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from tests.support.chats import BRIEF, TIME, TWO_CALLS, WEATHER, user
from worker.api.chat.chat_fields import ReasoningChatFields
from worker.api.chat.prompt import chat_prompt
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
