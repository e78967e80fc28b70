"""The random requests for llama-server and the worker, and which answers may differ."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from tests.support.byte_walk import answer
from tools.differential import bodies
from tools.differential.asking import Asked
from tools.differential.compare import Difference
from tools.differential.known import reason_of
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.request import Format, Grammar, JsonSchema


def test_the_same_numbers_make_the_same_requests() -> None:
    def some(seed: int) -> list[Asked]:
        return list(itertools.islice(bodies.generating(Random(seed)), 50))

    assert some(3) == some(3) and some(3) != some(4)


@pytest.mark.parametrize("name", ["grammar", "json_schema"])
def test_only_a_complete_text_of_its_form_may_differ(name: str) -> None:
    n_cut = 0
    for seed in range(60):
        made = getattr(bodies, name.removeprefix("json_"))(Random(seed))
        form: Format = Grammar(made, "g") if isinstance(made, str) else JsonSchema(made, "s")
        text = answer(constrain(form).constraint.grammar, seed)
        if not text:
            continue  # the walk did not end
        request = Asked("/completion", {name: made})
        for shown, is_whole in (text, True), (text[:-1], False), (text + "\x00", False):
            whole = {"answer": {"content": shown}}
            why = reason_of(request, Difference("answer.content", "", shown, whole))
            if is_whole:
                assert why is not None, (made, text)
            n_cut += not is_whole and why is None
    assert n_cut > 60, "a few forms also have a text without its end"
