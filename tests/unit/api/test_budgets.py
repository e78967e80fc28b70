"""Budgets of reasoning with the templates of several families: the engine follows the API's
request, and the answer is split as the family writes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.real_engine import RealEngine
from tests.support.scripted_api import ScriptedWorker
from tests.support.scripted_engine import info
from tests.support.supervised import CONFIG
from tests.unit.api.answers import Message, message_of
from tests.unit.api.round_trips import compiled, source
from worker.api.chat.inference import inference_of
from worker.api.chat.parse.conventions import conventions_of
from worker.api.dialects.openai.schema import ChatBody, read_chat
from worker.settings import Settings
from worker.wire.work import ChatPrompt

FAMILIES = ("Qwen-QwQ-32B", "Cohere2MoE", "Apriel-1.6-15b-Thinker-fixed", "Kimi-K3")
"""Templates with four ways to write the end of reasoning."""
BODY: Any = {"messages": [{"role": "user", "content": "Tell a story."}]}
BODY |= {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[RealEngine]:
    engine = RealEngine()
    yield engine
    engine.close()


def answer_to(engine: RealEngine, family: str, **fields: Any) -> tuple[Message, list[bytes]]:
    """Return the answer to a chat with these fields, and its tokens."""
    served = info(CONFIG)
    metadata = {"tokenizer.chat_template": source(family)}
    served = replace(served, model=replace(served.model, metadata=metadata))
    state = ScriptedWorker(Settings(), served).state
    inference = inference_of(read_chat(ChatBody.model_validate(BODY | fields), state), state, None)
    [request] = inference.requests
    assert isinstance(request.prompt, ChatPrompt)
    prompt = compiled(family).read(request.prompt).text()
    reasoning = request.sampling.reasoning
    request_id = engine.submit(
        prompt, max_tokens=48, ignore_eos=True, logprobs=0, reasoning=reasoning
    )
    engine.run()
    assert inference.parser_of is not None
    parser = inference.parser_of(prompt[-64:])
    deltas = [*parser.feed(engine.text(request_id)), *parser.finish()]
    return message_of(deltas), [each.piece for each in engine.logprobs(request_id)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_is_kept_to_the_token_by_every_family(engine: RealEngine, family: str) -> None:
    closing = conventions_of(source(family)).reasoning.closing
    free, _ = answer_to(engine, family)
    assert free.reasoning and not free.content, "without a budget it never ends"
    for budget in (1, 9):
        bounded, pieces = answer_to(engine, family, reasoning_budget=budget)
        assert bounded.content and free.reasoning.startswith(bounded.reasoning.rstrip())
        assert b"".join(pieces[budget:]).startswith(closing.encode()), pieces
    for nothing in ({"reasoning_budget": 0}, {"reasoning_effort": "none"}):
        silent, _ = answer_to(engine, family, **nothing)
        assert silent.content and not silent.reasoning, nothing
    words = " I have thought enough."
    message, _ = answer_to(engine, family, reasoning_budget=3, reasoning_budget_message=words)
    assert message.reasoning.endswith(words.rstrip())
