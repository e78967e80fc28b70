"""Constraints on the real engine: enforced with any sampler settings, and resumed from ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from builds import sdist
from builds.pins import pins
from tests.support.real_engine import RealEngine
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.request import Expression, Grammar, JsonSchema
from worker.errors import InvalidRequest
from worker.llama.constraint import GrammarVocabulary
from worker.llama.model import LoadOptions, Model
from worker.llama.reasoning import ReasoningTrack
from worker.wire.sampling import Constraint, ReasoningRules

CAPITAL = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
YES_NO = 'root ::= ("yes" | "no") "!"{2} # twice'
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
}


def constraint(text: str) -> Constraint:
    return constrain(Grammar(text, "grammar")).constraint


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 2.0},
        {"temperature": 0.0},
        {"temperature": 1e-39},
        {"temperature": 1e-9, "top_k": 1},
        {"top_k": 1},
        {"min_p": 1.0},
        {"top_p": 0.0},
        {"ignore_eos": True},
        {"ignore_eos": True, "temperature": 0.0},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    ],
    ids=str,
)
def test_a_constraint_holds_with_any_sampling(engine: RealEngine, sampling: dict[str, Any]) -> None:
    for seed in range(3):
        request_id = engine.submit(
            CAPITAL, constraint=constraint(YES_NO), **({"seed": seed} | sampling)
        )
        engine.run()
        assert engine.text(request_id) in ("yes!!", "no!!")
        assert engine.end(request_id).stop_reason == "EOS"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_stop_token_is_drawn_before_min_tokens_under_a_constraint(
    engine: RealEngine, temperature: float
) -> None:
    digits = {token for digit in "0123456789" for token in engine.tokens_of(digit)}
    some = tuple(sorted(digits))[:9]
    for seed in range(5):
        request_id = engine.submit(
            CAPITAL,
            constraint=constraint("root ::= [0-9]{40}"),
            stop_token_ids=some,
            min_tokens=12,
            seed=seed,
            temperature=temperature,
            max_tokens=40,
        )
        engine.run()
        assert engine.end(request_id).tokens_out >= 12


def test_a_stop_token_that_alone_is_allowed_ends_the_answer_before_min_tokens(
    engine: RealEngine,
) -> None:
    (only,) = engine.tokens_of("7")
    request_id = engine.submit(
        CAPITAL, constraint=constraint('root ::= "7"{40}'), stop_token_ids=(only,), min_tokens=12
    )
    engine.run()
    assert engine.end(request_id).stop_reason == "EOS"


def test_a_constraint_wins_over_a_bias(engine: RealEngine) -> None:
    needed = {token for text in ("yes!", "no!", "y", "n") for token in engine.tokens_of(text)}
    bias = tuple((token, -100.0) for token in needed)
    text = engine.generate(CAPITAL, constraint=constraint(YES_NO), logit_bias=bias)
    assert text in ("yes!!", "no!!")


def test_tiny_temperatures_are_greedy(engine: RealEngine) -> None:
    assert engine.generate(CAPITAL, temperature=1e-39) == engine.generate(CAPITAL, temperature=0.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_and_a_pattern_are_followed(engine: RealEngine, seed: int) -> None:
    schema = constrain(JsonSchema(SCHEMA, "s")).constraint
    found = json.loads(engine.generate(CAPITAL, constraint=schema, seed=seed, temperature=1.5))
    assert 0 <= found["n"] <= 99
    date = constrain(Expression(r"(19|20)\d\d/[01]\d", "guided_regex")).constraint
    text = engine.generate(CAPITAL, constraint=date, seed=seed, temperature=1.5)
    assert len(text) == 7 and text[:2] in ("19", "20") and text[4] == "/"


@pytest.mark.parametrize("text", ["start: (", "start: missing", "start: start", 'other: "a"'])
def test_a_grammar_that_does_not_compile_is_refused_by_its_field(
    engine: RealEngine, text: str
) -> None:
    with pytest.raises(InvalidRequest, match="grammar cannot be enforced") as caught:
        engine.submit(CAPITAL, constraint=Constraint(text, "grammar"))
    assert caught.value.details["field"] == "grammar"


def test_a_constraint_resumes_from_tokens(engine: RealEngine) -> None:
    vocabulary = GrammarVocabulary(engine.model)
    grammar = constraint('root ::= [a-z]+ (" " [a-z]+){3} "."')
    tokens = engine.tokens_of("one two three four.")
    first = vocabulary.follow(grammar)
    for n_taken, token in enumerate(tokens):
        again = vocabulary.follow(grammar)
        assert all(again.take(earlier) for earlier in tokens[:n_taken])
        n_vocab = engine.model.n_vocab
        assert again.allowed(n_vocab).tolist() == first.allowed(n_vocab).tolist()
        assert first.take(token)
    assert set(np.flatnonzero(first.allowed(n_vocab)).tolist()) == engine.model.eog


def test_a_constraint_begins_after_open_reasoning(engine: RealEngine) -> None:
    vocabulary = GrammarVocabulary(engine.model)
    grammar = Constraint('start: "yes"', "grammar", follows_reasoning=True)
    end = next(iter(engine.model.eog))
    closed = vocabulary.follow(grammar, track(engine, "<think></think>"))
    assert not closed.is_waiting and not closed.take(engine.tokens_of("hm")[0])
    reasoning = track(engine, "<think>\n")
    waiting = vocabulary.follow(grammar, reasoning)
    states = [waiting.is_waiting, waiting.take(end)]
    for token in engine.tokens_of("hm, no</think>"):
        assert waiting.take(token)
        reasoning.take(token)
    assert [*states, waiting.is_waiting] == [True, False, False]
    assert not waiting.take(engine.tokens_of("hm")[0])
    assert all(waiting.take(token) for token in engine.tokens_of("yes"))
    assert waiting.take(end)


def track(engine: RealEngine, prompt: str) -> ReasoningTrack:
    wish = ReasoningRules(("<think>",), "</think>", "</think>")
    return ReasoningTrack(wish, engine.model, engine.tokens_of(prompt), reopens=False)


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3", "starcoder", "falcon"])
def test_constraints_work_with_every_kind_of_vocabulary(name: str) -> None:
    vocabulary, model = published(name)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    follower = vocabulary.follow(constrain(JsonSchema(schema, "s")).constraint)
    opening = model.tokenize("{", add_special=False, parse_special=False)
    for token in opening:
        # SentencePiece prepends a space to a text; the answer begins without one.
        assert follower.take(token) or model.piece(token).startswith(b" ")
    # From there on the model's own tokens of a non-ASCII text are taken one by one.
    again = vocabulary.follow(Constraint('start: /[^x]*/ "x"', "g"))
    tokens = model.tokenize("Hello wörld, 日本 🦊\n ok x", add_special=False, parse_special=False)
    assert all(again.take(token) for token in tokens)
    assert again.take(min(model.eog))


def test_a_vocabulary_without_the_needed_tokens_is_refused() -> None:
    vocabulary, _ = published("bert-bge")
    with pytest.raises(InvalidRequest, match="this model's vocabulary"):
        vocabulary.follow(constraint(YES_NO))


def published(name: str) -> tuple[GrammarVocabulary, Model]:
    """Load a vocabulary of the pinned sdist, without weights."""
    folder = sdist.unpacked(pins()) / "vendor/llama.cpp/models"
    model = Model(str(folder / f"ggml-vocab-{name}.gguf"), LoadOptions(vocab_only=True))
    return GrammarVocabulary(model), model
