"""Positions of snapshots for memory that cannot be cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.bundled import bundled_gguf
from tests.unit.engine.test_loop import Engine
from tests.unit.engine.test_speculation import Prophet, guess_always
from worker.engine.cache import cache
from worker.engine.text.chat_template import ChatTemplate
from worker.engine.text.prompt import PromptBuilder
from worker.llama.model import Model
from worker.wire.work import ChatPrompt

KINDS = [{"recurrent": True}, {"window": 8}]


@pytest.mark.parametrize("options", KINDS)
def test_the_second_chat_already_has_the_system_prompt(options: dict[str, Any]) -> None:
    engine = Engine(**options)
    system = bytes(range(40))
    assert engine.ask(1, system + b"what is that?" * 2, n_system=40) == 0
    assert engine.ask(2, system + b"and what is this?" * 2, n_system=40) == 40


@pytest.mark.parametrize("options", KINDS)
def test_a_prompt_that_diverges_in_the_middle_continues_from_a_spaced_snapshot(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SPACING", 32)
    engine = Engine(**options)
    assert engine.ask(1, bytes(range(90))) == 0
    assert engine.ask(2, bytes(range(70)) + b"something else") == 64


class Wrong(Prophet):
    def _next(self, tokens: list[int]) -> int:
        return ord("!")


def test_guesses_are_in_no_snapshot() -> None:
    engine = Engine(n_slots=2, recurrent=True, most_back=5, drafter=Wrong(0))
    guess_always(engine)
    first = engine.submit(1, bytes(range(40)), max_tokens=50, most_given=20)
    while first.n_computed < 40 or first.n_left < 10:  # it gets forced tokens
        engine.turn()
    beginning = bytes(first.tokens)
    engine.submit(2, beginning + b"for which it waits", max_tokens=4)
    engine.run()
    assert engine.ask(3, beginning + b"and what is this?") == len(beginning)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = "{% if messages|length < 3 %}{{ raise_exception('more') }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Model]:
    model = Model(str(bundled_gguf("f32")))
    yield model
    model.close()


def test_the_system_prompt_ends_where_the_first_user_begins(vocabulary: Model) -> None:
    prompts = PromptBuilder(vocabulary, ChatTemplate(TEMPLATE, {}), 1000)
    chat = ChatPrompt(
        (
            {"role": "system", "content": "You are brief. Hello"},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
        )
    )
    tokens = prompts.build(chat)
    n_system = prompts.system_tokens(chat, tokens)
    text = prompts.detokenize(tuple(tokens[:n_system]))
    whole = "<|endoftext|><system>You are brief. Hello</system><user>"
    assert whole.startswith(text) and len(whole) - len(text) <= 2, "but for a token across the end"
    assert prompts.system_tokens("Hello", tokens) == 0
    only = ChatPrompt(({"role": "assistant", "content": "Hello"},))
    assert prompts.system_tokens(only, prompts.build(only)) == 0
    strict = PromptBuilder(vocabulary, ChatTemplate(STRICT, {}), 1000)
    assert strict.system_tokens(chat, strict.build(chat)) == 0
