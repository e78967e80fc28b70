"""Stateful samplers in a whole engine: an answer is the same after a crash, after preemption and
with a constraint."""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.real_engine import RealEngine
from worker.errors import InvalidRequest
from worker.llama.constraint import GrammarVocabulary
from worker.llama.context import Context
from worker.llama.sampler import Sampler
from worker.observability.metrics import Metrics
from worker.supervisor.job import Job
from worker.wire.messages import Accepted, Failed, Finished, Started, Token
from worker.wire.sampling import Constraint, ReasoningRules, Sampling
from worker.wire.work import InferenceRequest

CHAT = "<|im_start|>user\nTell me of {}.<|im_end|>\n<|im_start|>assistant\n"
WARM: dict[str, Any] = {"temperature": 1.4, "seed": 5, "ignore_eos": True}
COOL = WARM | {"temperature": 0.5}
"""Rounding depends on the batch, which may change a draw at a high temperature."""
DRY = {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
REMEMBERING: dict[str, dict[str, Any]] = {
    "dry": DRY,
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    "a window": {"repetition_penalty": 1.4, "presence_penalty": 0.4, "repeat_last_n": 12},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 2.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0},
    "adaptive_p": {
        "adaptive_target": 0.3, "adaptive_decay": 0.7, "min_p": 0.02,
        "samplers": ("min_p", "temperature", "adaptive_p"),
    },
    "penalties last": {
        **DRY, "repetition_penalty": 1.4, "top_k": 40, "repeat_last_n": 64,
        "samplers": ("top_k", "temperature", "dry", "penalties"),
    },
}  # fmt: skip
remembering = pytest.mark.parametrize("sampling", REMEMBERING.values(), ids=REMEMBERING)


def tokens_of(engine: RealEngine, request_id: int) -> list[Token]:
    return [event for event in engine.events[request_id] if isinstance(event, Token)]


@remembering
def test_another_engine_continues_with_the_same_answer(
    engine: RealEngine, sampling: dict[str, Any]
) -> None:
    options: dict[str, Any] = WARM | sampling | {"max_tokens": 40}
    whole = engine.submit(CHAT.format("cats"), **options)
    engine.run()
    ids = engine.ids(whole)
    assert len(ids) == 40
    sent: list[int] = []
    for event in tokens_of(engine, whole)[:30:7]:
        index = tokens_of(engine, whole).index(event)
        sent = [i for each in tokens_of(engine, whole)[: index + 1] for i in each.token_ids]
        rest = engine.submit(
            CHAT.format("cats"), produced=tuple(sent), learned=event.learned, **options
        )
        engine.run()
        assert sent + engine.ids(rest) == ids
    assert bool(event.learned) == ("mirostat" in sampling or "adaptive_target" in sampling)


@remembering
def test_samplers_remember_preempted_answers(sampling: dict[str, Any]) -> None:
    crowded, roomy = RealEngine(slots=3, n_cells=128, kv_unified=True), RealEngine()
    answers = []
    for engine in (crowded, roomy):
        requests = [
            engine.submit(CHAT.format(word), max_tokens=60, **COOL | sampling)
            for word in ("cats", "dogs", "fish")
        ]
        engine.run()
        answers.append([engine.ids(each) for each in requests])
    assert sum(map(len, answers[0])) > 128, "they do not fit together"
    assert answers[0] == answers[1]


@remembering
def test_a_constraint_holds_with_stateful_samplers(
    engine: RealEngine, sampling: dict[str, Any]
) -> None:
    digits = Constraint("start: /[0-9]{12}/", "grammar")
    options: dict[str, Any] = WARM | sampling | {"ignore_eos": False, "constraint": digits}
    text = engine.generate(CHAT.format("cats"), **options)
    assert len(text) == 12 and text.isdigit()
    assert engine.generate(CHAT.format("cats"), **options) == text


def test_a_text_is_biased_by_its_tokens(engine: RealEngine) -> None:
    paris = engine.model.tokenize(" Paris", add_special=False, parse_special=False)
    for bias in (((" Paris", -100.0),), tuple((token, -math.inf) for token in paris)):
        text = engine.generate(CHAT.format("the capital of France"), logit_bias=bias)
        assert "Paris" not in text


@pytest.mark.parametrize("count", [0, 1, 5, 10**6])
def test_odds_after_the_samplers(engine: RealEngine, count: int) -> None:
    options: dict[str, Any] = {
        "top_k": 3,
        "temperature": 1.2,
        "logprobs": min(count, engine.model.n_vocab),
    }
    request = engine.submit(CHAT.format("cats"), post_sampling_probs=True, max_tokens=8, **options)
    engine.run()
    entries = engine.logprobs(request)
    assert len(entries) >= 6, "the last ones may have no text yet"
    for entry in entries:
        assert len(entry.top) == min(count, 3) and 0 < math.exp(entry.logprob) <= 1
        if count >= 3:
            shares = {each.token_id: math.exp(each.logprob) for each in entry.top}
            assert sum(shares.values()) == pytest.approx(1)
            assert shares[entry.token_id] == pytest.approx(math.exp(entry.logprob))


class Row(NamedTuple):
    """Replaces a context: the logits of one row."""

    values: npt.NDArray[np.float32]

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        return self.values


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("forbids_only", [False, True])
def test_a_greedy_draw_is_the_likeliest_that_a_bias_leaves(
    engine: RealEngine, ignore_eos: bool, forbids_only: bool
) -> None:
    rng = np.random.default_rng(5)
    vocabulary, n_vocab = GrammarVocabulary(engine.model), engine.model.n_vocab
    for number in range(64):
        logits = rng.normal(size=n_vocab).astype(np.float32)
        likeliest = np.argsort(-logits)[: number % 4].tolist()
        bias = dict.fromkeys(likeliest, -math.inf)
        if not forbids_only:
            bias[int(rng.integers(n_vocab))] = 3.0
        if number % 2:
            logits[list(engine.model.eog)] = 9.0
        left = logits.copy()
        for token, added in bias.items():
            left[token] += added
        if ignore_eos:
            left[list(engine.model.eog)] = -math.inf
        # The usual draw, which can only take the likeliest, need not change the row.
        logits.flags.writeable = not forbids_only or left.argmax() != logits.argmax()
        wish = Sampling(0, temperature=0.0, ignore_eos=ignore_eos, logit_bias=tuple(bias.items()))
        context = cast(Context, Row(logits))
        token = Sampler(engine.model, wish, [], vocabulary).sample(context, 0)
        assert token == left.argmax()


def test_the_odds_of_a_greedy_draw_are_certain(engine: RealEngine) -> None:
    request = engine.submit(
        CHAT.format("cats"), post_sampling_probs=True, logprobs=5, max_tokens=4, top_k=0
    )
    engine.run()
    assert all(e.logprob == 0 and len(e.top) == 1 for e in engine.logprobs(request))


@pytest.mark.parametrize(("deterministic", "ends"), [(False, False), (True, False), (True, True)])
def test_a_job_takes_the_state_of_its_sampler_to_the_next_engine(
    deterministic: bool, ends: bool
) -> None:
    """A deterministic answer is computed again from its beginning, so it takes nothing along,
    unless it was told to end its reasoning, which it would then do too early."""
    sampling = Sampling(1, mirostat=2, reasoning=ReasoningRules(("<t>",), "</t>", "</t>"))
    request = InferenceRequest("j", "a", sampling, max_tokens=8, deterministic=deterministic)
    job = Job(1, request, Metrics("w"), lambda job, error: None)
    job.accept(Accepted(1, 2, array("i", [7, 8]).tobytes()))
    job.feed([Started(1, 0), Token(1, "a", (5, 6), learned=(4.5,))])
    job.feed([Token(1, "b", (9,), learned=(4.25,))])
    job.ends_reasoning = ends
    again = job.submission()
    assert isinstance(again, InferenceRequest)
    expected = ((), ()) if deterministic and not ends else ((5, 6, 9), (4.25,))
    assert (again.produced, again.learned) == expected
    assert again.sampling.reasoning is not None
    assert again.sampling.reasoning.budget == (0 if ends else None)
    if again.produced:
        assert job.continued([Token(1, "c", (10,))]), "it goes on behind what was sent"


def test_a_forced_token_is_certain(engine: RealEngine) -> None:
    sampling = Sampling(1, post_sampling_probs=True)
    sampler = Sampler(engine.model, sampling, [1], engine.vocabulary)
    sampler.follow_produced((5,))
    assert sampler.chain.log_probabilities(5, 3) == (0.0, [(5, 0.0)])


def ended(engine: RealEngine, **options: Any) -> tuple[list[int], Finished | Failed]:
    request = engine.submit("Once upon a time", max_tokens=12, **options)
    for _ in range(500):
        engine.turn()
        last = next(reversed(engine.events[request]), None)
        if isinstance(last, Finished | Failed):
            return engine.ids(request), last
    raise AssertionError("it does not end")


INFILL = {"samplers": ("top_k", "infill"), "top_k": 40, "temperature": 1.0}
WORD = Constraint('start: "yes"', "grammar")


def test_infill_ends_no_answer_that_may_not_end(engine: RealEngine) -> None:
    for options in ({"min_tokens": 9}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True}):
        ids, _ = ended(engine, **INFILL, **options)
        assert len(ids) >= 9, options
    ids, last = ended(engine, **INFILL, constraint=Constraint("start: /[a-z ]{8}/", "grammar"))
    assert isinstance(last, Finished) and ids


@pytest.mark.parametrize("ending", [{"min_tokens": 9}, {"ignore_eos": True}], ids=str)
def test_the_replacement_of_a_forbidden_end_is_certain(
    engine: RealEngine, ending: dict[str, Any]
) -> None:
    options: dict[str, Any] = INFILL | ending | {"post_sampling_probs": True, "logprobs": 1}
    request = engine.submit("Once upon a time", max_tokens=12, **options)
    engine.run()
    scores = engine.logprobs(request)
    assert [score.token_id for score in scores] == engine.ids(request)
    assert any(score.logprob == 0 and len(score.top) == 1 for score in scores)


def test_a_request_that_forbids_every_token_is_invalid(
    engine: RealEngine,
) -> None:
    """A retry would fail again, even if the text has begun."""
    every = tuple((token, -math.inf) for token in range(engine.model.n_vocab))
    without_y = tuple((t, -math.inf) for t in range(len(every)) if b"y" in engine.model.piece(t))
    begun = Constraint('start: "x" /y+/', "grammar")
    cases: list[tuple[dict[str, Any], int]] = [
        ({"constraint": WORD, "logit_bias": every}, 0),
        ({"constraint": begun, "logit_bias": without_y}, 1),
        ({"logit_bias": every, "samplers": ("top_n_sigma",), "top_n_sigma": 1.0}, 0),
        ({"logit_bias": every, "temperature": 0.0}, 0),
    ]
    for options, n_tokens in cases:
        ids, last = ended(engine, **options)
        assert len(ids) == n_tokens and isinstance(last, Failed)
        assert isinstance(last.error, InvalidRequest) and not last.error.retriable
        assert last.error.details["field"] in ("logit_bias", "grammar")
    assert ended(engine, constraint=WORD)[0]
