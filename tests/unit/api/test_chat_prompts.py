"""What a client says of a chat, as the engine gets it, or the field for which it is refused."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.chats import SPECIAL, TEMPLATES, assistant, result, user
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.request import Part
from worker.api.dialects.anthropic.schema import MessagesBody, chat_of
from worker.api.dialects.openai.schema import ChatBody
from worker.api.http.state import AppState
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest
from worker.settings import Settings
from worker.wire.work import ChatPrompt

SERVED = SimpleNamespace(has_chat_template=True, chat_template="")
STATE = cast(AppState, SimpleNamespace(served=SERVED, settings=Settings()))


def prompt_of(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    body = ChatBody.model_validate({"model": "m", "messages": messages, **fields})
    return chat_prompt(body.chat(), STATE)


def test_a_call_without_arguments_is_one_with_none() -> None:
    """Clients send an empty text for a function without parameters, and streams begin with one."""

    def chat(**arguments: Any) -> ChatPrompt:
        call = {"id": "call00001", "type": "function", "function": {"name": "now", **arguments}}
        calling = {"role": "assistant", "content": None, "tool_calls": [call]}
        return prompt_of(user("The time?"), calling, result(1, "12:00"))

    for path in sorted(TEMPLATES.glob("*.jinja")):
        template = ChatTemplate(path.read_text(), SPECIAL)
        whole = template.read(chat(arguments="{}")).text()
        for given in ({"arguments": ""}, {"arguments": None}, {}):
            assert template.read(chat(**given)).text() == whole, (path.stem, given)


@pytest.mark.parametrize("role", ["system", "developer", "tool", "function"])
def test_what_an_answer_goes_on_with_is_said_by_the_assistant_or_the_user(role: str) -> None:
    """Where a template writes another's words first, those of all others would be cut off."""
    turns = [user("a"), assistant("b")]
    with pytest.raises(InvalidRequest, match=r"messages\[2\]\.role must be assistant or user"):
        prompt_of(*turns, {"role": role, "content": "c"}, continue_final_message=True)
    assert prompt_of(*turns, continue_final_message=True).continue_final_message
    assert prompt_of(turns[0], continue_final_message=True).continue_final_message


def test_many_documents_are_put_together_at_once() -> None:
    """Joined one by one they took seconds: each copied all that came before it."""
    source = {"type": "text", "media_type": "text/plain", "data": "a" * 128}
    content = [{"type": "document", "source": source}] * 16_000
    body = MessagesBody.model_validate(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    )
    began = time.thread_time()
    chat = chat_of(body)
    assert time.thread_time() - began < 1
    assert chat.messages[0].content == (Part("\n\n".join(["a" * 128] * 16_000)),)
