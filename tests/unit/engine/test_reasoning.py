"""Budgets of reasoning are exact to the token, whatever happens to the stream."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.random_models import KINDS, Kind, random_model
from tests.support.real_engine import RealEngine
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.delta import Reasoning
from worker.api.chat.parse.conventions import GENERIC, THINK, THINKING, Conventions, Thinking
from worker.api.chat.parse.parser import AnswerParser
from worker.api.chat.request import Expression
from worker.engine.speculation.lookup import Lookup
from worker.llama.reasoning import ReasoningTrack
from worker.wire.messages import Finished, Token
from worker.wire.sampling import ReasoningRules

PROMPT = "<|im_start|>user\nTell a story.<|im_end|>\n<|im_start|>assistant\n<think>\n"
CLOSING = "\n</think>"
WISH = ReasoningRules(("<think>",), "</think>", CLOSING)


@dataclass
class Answer:
    ids: list[int]
    text: str


def answered(
    engine: RealEngine, budget: int | None, message: str = "", **options: object
) -> Answer:
    wish = replace(WISH, budget=budget, message=message)
    wanted = {"max_tokens": 40, "ignore_eos": True, "reasoning": wish} | options
    request_id = engine.submit(PROMPT, **wanted)  # type: ignore[arg-type]
    engine.run()
    return Answer(engine.ids(request_id), engine.text(request_id))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", [0, 1, 7, 30])
def test_a_budget_is_kept_to_the_token(engine: RealEngine, budget: int, temperature: float) -> None:
    free = answered(engine, None, temperature=temperature)
    bounded = answered(engine, budget, temperature=temperature)
    closing = engine.tokens_of(CLOSING)
    assert bounded.ids[:budget] == free.ids[:budget], "the same thoughts, up to there"
    assert "</think>" not in free.text
    assert bounded.ids[budget : budget + len(closing)] == closing
    assert len(bounded.ids) == 40, "and the answer goes on behind them"
    assert bounded.text.count("</think>") == 1


def test_a_message_comes_before_the_end(engine: RealEngine) -> None:
    text = answered(engine, 3, message=" So I must answer.<|im_end|>").text
    before, _, behind = text.partition(" So I must answer.<|im_end|>\n</think>")
    assert before and behind, "special tokens in a message are its text"


def test_the_closing_takes_one_step(engine: RealEngine) -> None:
    wish = replace(WISH, budget=2, message=" That is all that I have time for.")
    request_id = engine.submit(PROMPT, max_tokens=40, ignore_eos=True, reasoning=wish)
    engine.turn()
    frames = []
    while "</think>" not in engine.text(request_id):
        before = len(engine.ids(request_id))
        engine.turn()
        frames.append(len(engine.ids(request_id)) - before)
    engine.run()
    assert max(frames) > 10 and len(frames) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_memory_accepts_forced_tokens(kind: Kind) -> None:
    engine = RealEngine(path=random_model(kind))
    free, bounded = answered(engine, None).ids, answered(engine, 5).ids
    closing = engine.tokens_of(CLOSING)
    n_spent = bounded.index(closing[0])  # such a model may have started a character
    closed = n_spent + len(closing)
    assert 5 <= n_spent <= 8 and bounded[:closed] == free[:n_spent] + closing
    assert answered(engine, 5, produced=tuple(bounded[:closed])).ids == bounded[closed:]


def test_guesses_do_not_change_reasoning_with_a_budget() -> None:
    plain, guessing = RealEngine(slots=1), RealEngine(slots=1, drafter=Lookup())
    for budget in (0, 4, 9):
        assert answered(guessing, budget).ids == answered(plain, budget).ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_engine_continues_at_every_token(engine: RealEngine, temperature: float) -> None:
    message = " Time is up."
    whole = answered(engine, 4, message, temperature=temperature).ids
    for at in range(1, 24):
        rest = answered(engine, 4, message, temperature=temperature, produced=tuple(whole[:at])).ids
        assert rest == whole[at:], at


def test_a_preempted_stream_keeps_its_budget(engine: RealEngine) -> None:
    alone = answered(engine, 6, max_tokens=100).ids
    tight = RealEngine(slots=2, kv_unified=True, n_cells=256)
    wish = replace(WISH, budget=6)
    wanted = {"max_tokens": 100, "ignore_eos": True, "reasoning": wish}
    both = [tight.submit(PROMPT, **wanted) for _ in range(2)]  # type: ignore[arg-type]
    for _ in range(9):
        tight.turn()
    assert tight.scheduler.preempt_youngest() is not None
    tight.run()
    assert [tight.ids(each) for each in both] == [alone, alone]


def test_a_constraint_begins_after_the_closing(engine: RealEngine) -> None:
    yes = constrain(Expression("yes|no", "guided_regex")).constraint
    yes = replace(yes, follows_reasoning=True)
    text = answered(engine, 5, constraint=yes, ignore_eos=False).text
    thought, _, answer = text.partition(CLOSING)
    assert thought and answer in ("yes", "no")


@pytest.mark.parametrize("budget", [1, None])
def test_a_constraint_of_the_whole_answer_contains_no_closing(
    engine: RealEngine, budget: int | None
) -> None:
    form = constrain(Expression("[a-z]{30}", "guided_regex")).constraint
    wish = replace(WISH, budget=budget)
    request_id = engine.submit(PROMPT, max_tokens=40, reasoning=wish, constraint=form)
    engine.turn()
    engine.loop.end_reasoning(request_id)
    engine.run()
    text = engine.text(request_id)
    assert len(text) == 30 and text.isalpha()


@pytest.mark.parametrize("is_told", [False, True])
def test_a_character_is_completed_before_the_closing(engine: RealEngine, is_told: bool) -> None:
    fox = engine.tokens_of("🦊")
    assert len(fox) > 1
    produced = (*engine.tokens_of("A fox "), fox[0])
    bias = ((fox[1], 100.0),)
    wish = replace(WISH, budget=None if is_told else len(produced))
    wanted = {"max_tokens": 40, "ignore_eos": True, "reasoning": wish, "logit_bias": bias}
    request_id = engine.submit(PROMPT, produced=produced, **wanted)  # type: ignore[arg-type]
    if is_told:
        engine.loop.end_reasoning(request_id)
    engine.run()
    closed = engine.text(request_id)
    thought, _, answer = closed.partition(CLOSING)
    assert answer and len(thought) == 1 and "\ufffd" not in thought


def test_reasoning_that_an_answer_begins_counts_too(engine: RealEngine) -> None:
    prompt = PROMPT.removesuffix("<think>\n")
    produced = tuple(engine.tokens_of("\n<think>\nHm"))
    n_spent = len(engine.tokens_of("Hm"))
    wish = replace(WISH, budget=n_spent + 3)
    request_id = engine.submit(
        prompt, max_tokens=30, ignore_eos=True, reasoning=wish, produced=produced
    )
    engine.run()
    closing = engine.tokens_of(CLOSING)
    assert engine.ids(request_id)[2:].index(closing[0]) in (0, 1)


def test_a_running_block_is_closed_on_command(engine: RealEngine) -> None:
    request_id = engine.submit(PROMPT, max_tokens=40, ignore_eos=True, reasoning=WISH)
    for _ in range(6):
        engine.turn()
    n_before = len(engine.ids(request_id))
    engine.loop.end_reasoning(request_id)
    engine.loop.end_reasoning(request_id + 1)  # an ended or unknown one is ignored
    engine.run()
    closing = engine.tokens_of(CLOSING)
    assert engine.ids(request_id)[n_before : n_before + len(closing)] == closing
    assert len(engine.ids(request_id)) == 40


def test_forced_tokens_have_log_probabilities(engine: RealEngine) -> None:
    wish = replace(WISH, budget=3)
    request_id = engine.submit(PROMPT, max_tokens=12, ignore_eos=True, reasoning=wish, logprobs=0)
    engine.run()
    ids = engine.ids(request_id)
    events = [e for e in engine.events[request_id] if isinstance(e, Token | Finished)]
    scored = [p for e in events for p in e.logprobs]
    assert [p.token_id for p in scored] == ids == answered(engine, 3, max_tokens=12).ids


PARTS = ["<think>", "</think>", "[THINK]", "[/THINK]", "\n", " ", "a", "b c", "<th", "ink>", "<"]
MISTRAL = next(each for each in THINKING if each.begin == "[THINK]")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=12), st.sampled_from([THINK, MISTRAL]))
def test_engine_and_parser_agree_where_reasoning_is(
    engine: RealEngine, parts: list[str], thinking: Thinking
) -> None:
    wish = ReasoningRules((thinking.begin,), thinking.end, thinking.end, anywhere=thinking.anywhere)
    track = ReasoningTrack(wish, engine.model, (), reopens=True)
    text = "".join(parts)
    for part in parts:
        for token in engine.tokens_of(part):
            track.take(token)
    parser = AnswerParser(Conventions(GENERIC, thinking), None)
    deltas = [*parser.feed(text + "Q."), *parser.finish()]
    is_thought = isinstance(deltas[-1], Reasoning)
    assert track.is_open == is_thought
