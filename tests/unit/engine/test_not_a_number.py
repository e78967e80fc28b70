"""NaN of one request does not reach others, although llama.cpp masks the cells of others by adding
to their scores, which keeps NaN."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest

from tests.support.random_models import Kind, random_model
from tests.support.real_engine import RealEngine
from tests.unit.engine.test_constraints import constraint
from worker.engine.model_runner import ModelRunner
from worker.engine.sequence import Sequence
from worker.engine.speculation.draft import DraftModel
from worker.engine.speculation.lookup import Lookup
from worker.engine.speculation.speculation import Drafter, Guess
from worker.llama.context import Context, ContextOptions
from worker.llama.draw import NotANumber
from worker.llama.model import LoadOptions, Model
from worker.llama.pooled import PooledContext
from worker.llama.sampler import Sampler
from worker.wire.messages import Failed, PromptScored

STORY = "Once upon a time, there was a clever fox named Otto. Otto loved to dance. One day, Otto"
REFRAIN = "One, two, three, one, two, three, one, two, three, one, two,"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return a model whose embedding of the last token is NaN, as may happen for untrained tokens;
    and that token."""
    return break_one("dense", tmp_path_factory.mktemp("broken"))


def break_one(kind: Kind, folder: Path) -> tuple[Path, int]:
    path = folder / "broken.gguf"
    shutil.copy(random_model(kind), path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    rows = tensors["token_embd.weight"].data
    rows[-1] = np.nan
    return path, len(rows) - 1


def in_one_pool(
    path: Path, flash_attention: Literal["on", "off"] = "off", **options: Any
) -> RealEngine:
    return RealEngine(path=path, kv_unified=True, flash_attention=flash_attention, **options)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("guesses", [True, False])
def test_nan_does_not_change_the_texts_of_others(
    broken: tuple[Path, int],
    flash_attention: Literal["on", "off"],
    kv_unified: bool,
    guesses: bool,
) -> None:
    path, token = broken
    drafter = Lookup() if guesses else None
    engine = RealEngine(
        path=path, kv_unified=kv_unified, flash_attention=flash_attention, drafter=drafter
    )
    alone = engine.generate(STORY, max_tokens=24), engine.generate(REFRAIN, max_tokens=24)
    for at, length in (1, 0), (4, 1), (9, 6):
        requests = [engine.submit(text, max_tokens=24) for text in (STORY, REFRAIN)]
        for _ in range(at):
            engine.turn()
        bad = engine.submit((token, *engine.prompts.build("A bad one" + length * STORY)))
        engine.run()
        assert engine.have_failed(bad)
        assert tuple(engine.text(each) for each in requests) == alone
        late = engine.submit(STORY + " went", max_tokens=4)
        engine.run()
        assert engine.have_finished(late)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
def test_embeddings_after_nan_are_numbers(
    broken: tuple[Path, int], flash_attention: Literal["on", "off"]
) -> None:
    path, token = broken
    options = ContextOptions(
        n_ctx=256, n_seq_max=2, embeddings=True, kv_unified=True, flash_attention=flash_attention
    )
    context = Context(Model(str(path), LoadOptions()), options)
    compute = PooledContext(context)
    (before,) = compute([[1, 2, 3]])
    with pytest.raises(NotANumber):
        compute([[1, 2, token] * 9])
    (after,) = compute([[1, 2, 3]])
    assert np.array_equal(before, after)
    context.close()


def test_a_draft_model_that_computes_nan_guesses_nothing(broken: tuple[Path, int]) -> None:
    path, token = broken
    options = ContextOptions(n_ctx=512, n_batch=64, flash_attention="off")
    drafter = DraftModel(Context(Model(str(path)), options), token + 1)
    engine = RealEngine(path=random_model("dense"), drafter=drafter)
    plain = RealEngine(path=random_model("dense"))
    for prompt in ((1, token, 2), (1, 2, 3), (2, 1, token), (3, 2)):
        requests = [each.submit(prompt, max_tokens=12) for each in (engine, plain)]
        engine.run()
        plain.run()
        assert engine.ids(requests[0]) == plain.ids(requests[1]) and len(plain.ids(requests[1])) > 1


class Guesser(Drafter):
    """Guesses one token."""

    kinds: Rows[float] = (0.99,)
    computes = False

    def __init__(self, token: int) -> None:
        self._token = token

    def follow(self, sequence: Sequence) -> bool:
        return True

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        return [Guess(self._token, 0)] * min(most, 1)


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("n_streams", [1, 2])
def test_a_guess_that_makes_nan_does_not_change_the_text(
    broken: tuple[Path, int], flash_attention: Literal["on", "off"], n_streams: int
) -> None:
    path, token = broken
    plain, engine = (
        in_one_pool(path, flash_attention=flash_attention, drafter=drafter)
        for drafter in (None, Guesser(token))
    )
    alone = plain.generate(STORY, max_tokens=40)
    requests = [engine.submit(STORY, max_tokens=40) for _ in range(n_streams)]
    engine.run()
    assert [engine.text(each) for each in requests] == [alone] * n_streams


def test_forced_tokens_do_not_hide_nan(broken: tuple[Path, int]) -> None:
    path, token = broken
    engine = in_one_pool(path)
    alone = engine.generate(STORY, max_tokens=12)
    grammar = constraint('root ::= "Hello world, this is" [0-9]{4}')
    good = engine.submit(STORY, max_tokens=12)
    engine.turn()
    bad = engine.submit((*engine.prompts.build(REFRAIN), token), constraint=grammar)
    late = engine.submit(STORY, max_tokens=12)
    engine.run()
    assert engine.have_failed(bad) and not engine.ids(bad)
    assert engine.text(good) == engine.text(late) == alone


def test_a_cancelled_request_with_nan_does_not_fail_the_next(
    broken: tuple[Path, int],
) -> None:
    path, token = broken
    engine = in_one_pool(path, prefill_budget=8)
    alone = engine.generate(STORY[:20], max_tokens=12)
    bad = engine.submit((token, *engine.prompts.build(REFRAIN * 3)))
    good = engine.submit(STORY[:20], max_tokens=12)
    while not any(s.is_on_trial and s.n_computed for s in engine.scheduler.running):
        engine.turn()
    engine.loop.cancel(bad)
    engine.run()
    assert engine.text(good) == alone


@pytest.mark.parametrize("produced", [(), (5,) * 20])
def test_log_probabilities_of_other_prompts_are_numbers(
    broken: tuple[Path, int], produced: tuple[int, ...]
) -> None:
    path, token = broken
    engine, plain = (in_one_pool(path, prefill_budget=16) for _ in range(2))

    def scored(engine: RealEngine, request_id: int) -> list[float]:
        [scored] = [e for e in engine.events[request_id] if isinstance(e, PromptScored)]
        return [each.logprob for each in scored.logprobs[1:]]

    wanted: dict[str, Any] = {"prompt_logprobs": 0, "produced": produced}
    bad = engine.submit((token, *engine.prompts.build(REFRAIN * 2)), **wanted)
    good = [each.submit(STORY, **wanted) for each in (engine, plain)]
    engine.run()
    plain.run()
    assert engine.have_failed(bad)
    assert not any(isinstance(event, PromptScored) for event in engine.events[bad])
    assert scored(engine, good[0]) == pytest.approx(scored(plain, good[1]), abs=1e-3)


def test_multi_token_prediction_continues_after_nan(tmp_path: Path) -> None:
    path, token = break_one("predicting", tmp_path)
    plain, engine = in_one_pool(path), in_one_pool(path, mtp=True, prefill_budget=8)
    for length in 50, 60, 70, 80:
        bad = engine.submit((token, *engine.prompts.build(REFRAIN * 2)))
        engine.run()
        assert engine.have_failed(bad)
        alone = plain.generate(STORY[:length], max_tokens=40)
        assert engine.generate(STORY[:length], max_tokens=40) == alone


@pytest.mark.parametrize("seed", range(6))
def test_requests_with_nan_come_among_others_in_any_order(
    broken: tuple[Path, int], seed: int
) -> None:
    path, token = broken
    dice = random.Random(seed)
    engine = in_one_pool(
        path,
        slots=3,
        n_cells=320,  # which do not hold three of the longest
        prefill_budget=dice.choice([8, 64]),
        prefix_cache=dice.random() < 0.5,
    )
    good = [
        (dice.choice([STORY, REFRAIN])[dice.randrange(40) :] * dice.randint(1, 3), 1 + n)
        for n in range(8)
    ]
    alone = {each: engine.generate(each[0], max_tokens=each[1]) for each in good}
    requests: dict[int, tuple[str, int]] = {}
    bad: list[int] = []
    for text, n_tokens in good:
        requests[engine.submit(text, max_tokens=n_tokens)] = (text, n_tokens)
        if dice.random() < 0.5:
            prompt = list(engine.prompts.build(REFRAIN * dice.randint(1, 3)))
            prompt.insert(dice.randrange(1, len(prompt)), token)
            bad.append(engine.submit(tuple(prompt), max_tokens=3))
        for _ in range(dice.randrange(6)):
            engine.turn()
    engine.run()
    assert engine.have_failed(*bad)
    assert {r: engine.text(r) for r in requests} == {r: alone[each] for r, each in requests.items()}


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0}, {"mirostat": 1}, {"mirostat": 2}], ids=str
)
def test_infinite_logits_fail_their_own_request_alone(
    monkeypatch: pytest.MonkeyPatch, value: float, sampling: dict[str, Any]
) -> None:
    engine = in_one_pool(random_model("dense"))
    alone = engine.generate(STORY, max_tokens=12)
    good = engine.submit(STORY, max_tokens=12)
    bad = engine.submit(REFRAIN, max_tokens=12, seed=13, **sampling)
    sample = ModelRunner.sample

    def overflowing(runner: ModelRunner, sampler: Sampler, chunk: int, guesses: int = 0) -> int:
        if sampler._seed == 13:
            runner.cells.logits(runner._rows[chunk])[:] = value
        return sample(runner, sampler, chunk, guesses)

    monkeypatch.setattr(ModelRunner, "sample", overflowing)
    engine.run()
    [*_, failed] = engine.events[bad]
    assert isinstance(failed, Failed) and isinstance(failed.error, NotANumber)
    assert not engine.ids(bad) and engine.text(good) == alone


def test_a_stream_that_computes_nan_again_fails(broken: tuple[Path, int]) -> None:
    path, token = broken
    engine = in_one_pool(path)
    other = engine.submit(STORY, max_tokens=24)
    forced = engine.submit(STORY, max_tokens=24, logit_bias=((token, 100.0),))
    engine.run()
    assert engine.have_failed(forced) and len(engine.ids(forced)) == 1
    assert engine.text(other) == engine.generate(STORY, max_tokens=24)
