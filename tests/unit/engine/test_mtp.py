"""Guesses by a model's own layers for multi-token prediction: texts are the same as without, and
reading in pieces gives the layers the same state as reading at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.random_adapters import random_adapter
from tests.support.random_models import random_model
from tests.support.real_engine import RealEngine
from tests.unit.engine.test_speculation import (
    LIST,
    SAMPLINGS,
    STORY,
    differs_as_drawn,
    guess_always,
    prompts,
    same_but_for_ties,
)
from worker.engine.speculation.mtp import Head
from worker.errors import BackendMismatch
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context, ContextOptions
from worker.llama.model import LoadOptions, Model
from worker.wire.adapters import Applied

N_OUT = 28


def predicting(*, mtp: bool = True, **options: Any) -> RealEngine:
    return RealEngine(path=random_model("predicting"), mtp=mtp, **options)


@pytest.fixture(scope="module")
def plain() -> Iterator[RealEngine]:
    engine = predicting(slots=2, mtp=False)
    yield engine
    engine.close()


def head_of(engine: RealEngine) -> Head:
    assert engine.loop.speculation is not None
    drafter = engine.loop.speculation._drafter
    assert isinstance(drafter, Head)
    return drafter


def check_cells(engine: RealEngine) -> None:
    """Check that the head's cells have tokens without a gap, up to the last that it counts."""
    head = head_of(engine)
    assert head._context.last_position(0) in (-1, len(head._tokens) - 1)


@pytest.mark.parametrize(
    ("batch", "sampling"),
    [*((2048, each) for each in SAMPLINGS), (15, SAMPLINGS[0]), (2, SAMPLINGS[-1])],
    ids=str,
)
def test_guesses_do_not_change_the_text_of_a_stream(
    plain: RealEngine, sampling: dict[str, Any], batch: int
) -> None:
    engine = predicting(slots=2, batch=batch, prefill_budget=batch)
    speculation = guess_always(engine)
    n_rounded = 0
    for number, prompt in enumerate(prompts(7)):
        n_rounded += differs_as_drawn(engine, plain, prompt, N_OUT, sampling | {"seed": number})
        check_cells(engine)
    assert n_rounded <= 1
    assert 0 < speculation.n_accepted < speculation.n_drafted


def logits_of_head(engine: RealEngine, request_id: int, token: int) -> npt.NDArray[np.float32]:
    """Return the head's logits after a running stream, whose last token becomes `token`."""
    sequence, head = engine.loop._sequences[request_id], head_of(engine)
    sequence.tokens[-1] = token
    assert head.follow(sequence) and head._compute([token])
    logits = head._context.logits(0).copy()
    head._cut(len(sequence.tokens) - 1)
    return logits


@pytest.mark.parametrize("kv_unified", [False, True])
def test_reading_in_pieces_equals_reading_at_once(kv_unified: bool) -> None:
    """With right and wrong guesses, turns of a conversation and other streams in between."""
    engine = predicting(slots=3, kv_unified=kv_unified, flash_attention="off")
    fresh = predicting(slots=3, flash_attention="off", prefix_cache=False)
    guess_always(engine)
    dice = random.Random(5)

    def some(n: int) -> tuple[int, ...]:
        return tuple(dice.randrange(300, engine.model.n_vocab) for _ in range(n))

    def at_once(tokens: list[int]) -> npt.NDArray[np.float32]:
        request_id = fresh.submit(tuple(tokens[:-1]), max_tokens=2, ignore_eos=True)
        while not fresh.ids(request_id):
            fresh.turn()
        logits = logits_of_head(fresh, request_id, tokens[-1])
        fresh.run()
        return logits

    prompt = some(90)
    for turn in range(4):
        request_id = engine.submit(prompt, max_tokens=60, ignore_eos=True, temperature=1.0)
        while len(engine.ids(request_id)) < 40:
            engine.turn()
        tokens = list(engine.loop._sequences[request_id].tokens)
        in_pieces = logits_of_head(engine, request_id, tokens[-1])
        differs = np.abs(in_pieces - at_once(tokens)).max()
        without = np.abs(in_pieces - at_once(tokens[-20:])).max()
        print(turn, differs, without)
        # At each turn, the state before the first computed token is unknown.
        assert differs < (0.1 if turn else 0.001) * without
        engine.run()
        prompt = (*prompt, *engine.ids(request_id)[: 60 - 20 * (turn % 2)], *some(30))
    for _ in range(2):
        engine.submit(some(40), max_tokens=20, ignore_eos=True)
    engine.run()


def test_guesses_do_not_change_streams_that_come_and_go(plain: RealEngine) -> None:
    """Guesses for single streams; some are cancelled, in their prompt or in their answer."""
    engine = predicting(slots=4, kv_unified=True, n_cells=900)
    speculation = guess_always(engine)
    dice = random.Random(8)
    words = f"{LIST} {STORY}".split()
    requests: list[tuple[int, str, bool]] = []
    for _ in range(40):
        text = " ".join(dice.choices(words, k=dice.randint(1, 120)))
        request_id = engine.submit(text, max_tokens=N_OUT, ignore_eos=True)
        is_cancelled = dice.random() < 0.2
        for _ in range(dice.choice((0, 1, 3, 30))):
            engine.turn()
            check_cells(engine)
        if is_cancelled:
            engine.loop.cancel(request_id)
        requests.append((request_id, text, is_cancelled))
    engine.run()
    for request_id, text, is_cancelled in requests:
        without_guesses = plain.submit(text, max_tokens=N_OUT, ignore_eos=True)
        plain.run()
        ids, whole = engine.ids(request_id), plain.ids(without_guesses)
        if not is_cancelled:
            assert engine.have_finished(request_id)
            assert len(ids) == N_OUT
        assert same_but_for_ties(plain, text, ids, whole[: len(ids)])
    assert speculation.n_accepted
    assert not speculation._streams


def test_read_tokens_are_kept_only_for_the_same_tenant_and_adapters(tmp_path: Path) -> None:
    adapter = random_adapter(random_model("predicting"), tmp_path / "adapter", 1)
    engine = predicting(slots=2, adapters=(adapter,))
    guess_always(engine)
    head, n_rows = head_of(engine), 0
    compute = head._compute

    def counted(tokens: list[int]) -> bool:
        nonlocal n_rows
        n_rows += len(tokens)
        return compute(tokens)

    head._compute = counted  # type: ignore[method-assign]
    n_prompt = len(engine.prompts.build(STORY))
    adapted: Applied = ((0, 1.0),)
    for salt, adapters, is_kept in (
        ("one", (), False),
        ("one", (), True),
        ("two", (), False),
        ("two", adapted, False),
        ("two", adapted, True),
        ("two", (), False),
    ):
        n_rows = 0
        engine.generate(STORY, max_tokens=3, cache_salt=salt, adapters=adapters, ignore_eos=True)
        assert 0 < n_rows < 10 if is_kept else n_rows >= n_prompt - 1, (salt, adapters)


def test_hidden_states_have_the_names_that_are_looked_up() -> None:
    """They are not in llama.cpp's API, so a new pinned version may have other names."""
    assert library.hidden_states().row is not None


def test_a_llama_cpp_without_hidden_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __getitem__(self, name: str) -> Any:
            raise AttributeError(f"undefined symbol: {name}")

    library.hidden_states.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", Without)
    with pytest.raises(BackendMismatch, match="--speculate mtp: this llama.cpp does not"):
        library.hidden_states()


def test_hidden_states_are_those_of_each_row(plain: RealEngine) -> None:
    """Even if a split pool computes the rows of a batch in another order."""
    model = Model(str(random_model("predicting")), LoadOptions(mtp=True))
    found = []
    for slots, order in ((1, [0]), (3, [2, 0, 1])):
        options = ContextOptions(n_ctx=64 * slots, n_seq_max=slots, mtp="trunk", n_ubatch=8)
        context, batch = Context(model, options), Batch(64)
        for slot in order:
            batch.add(slot, 0, list(range(300, 312)), logits=slot == 0)
        assert context.decode(batch) == "ok"
        states = context.hidden_states(range(12 * len(order))).copy()
        found += [states[at : at + 12] for at in range(0, len(states), 12)]
        context.close()
    model.close()
    assert np.std(found[0]) > 0.1
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=0.02)
