"""Concurrent streams on each kind of memory have the same texts as alone.

The models are random, so that every wrong cell or state has an effect. Without flash attention,
which rounds to half precision differently for one row and for many (0.03 in these logits), another
order of sums moves a logit by less than 1e-5: texts may differ only where the two best are that
close.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.random_models import KINDS, Kind, random_model
from tests.support.real_engine import RealEngine, random_tokens
from worker.wire.adapters import Applied

ROUNDING = 1e-4
"""Two logits that are closer than this may swap places."""
SLOTS, ANSWER = 4, 48
CASES = [(kind, unified) for kind in KINDS if kind != "experts" for unified in (False, True)]
"""Models with experts have the memory of windowed ones."""


class Alone:
    """Greedy answers, each computed alone from its first token on, with request `options`."""

    def __init__(
        self,
        kind: Kind,
        adapters: tuple[Path, ...] = (),
        options: Sequence[Mapping[str, Any]] = ({},),
    ) -> None:
        self._options = options
        self._engine = RealEngine(
            slots=1,
            path=random_model(kind),
            flash_attention="off",
            prefix_cache=False,
            adapters=adapters,
        )
        self.answer = functools.cache(self._answer)

    def _answer(
        self, prompt: tuple[int, ...], adapters: Applied, option: int
    ) -> tuple[list[int], list[float]]:
        """Return token ids, and the margin of each over the second best."""
        fields = {"max_tokens": ANSWER, "ignore_eos": True, **self._options[option], "logprobs": 2}
        request_id = self._engine.submit(prompt, adapters=adapters, **fields)
        self._engine.run()
        tops = [entry.top for entry in self._engine.logprobs(request_id)]
        margins = [first.logprob - second.logprob for first, second in tops]
        return self._engine.ids(request_id), margins

    def differs(
        self, prompt: tuple[int, ...], ids: list[int], adapters: Applied = (), option: int = 0
    ) -> str | None:
        """Return the difference of an answer, if any."""
        expected, margins = self.answer(prompt, adapters, option)
        for index, (own, other) in enumerate(zip(expected, ids, strict=False)):
            if own != other:
                margin = margins[index]
                return None if margin < ROUNDING else f"token {index} differs by {margin:.3g}"
        return None

    def compared(self, engine: RealEngine, prompt: tuple[int, ...]) -> tuple[int, list[int]]:
        """Check that an engine gives the same answer; returns the number of cached tokens, and the
        answer."""
        request_id = engine.submit(prompt, max_tokens=ANSWER, ignore_eos=True)
        engine.run()
        ids = engine.ids(request_id)
        assert self.differs(prompt, ids) is None
        return engine.cached_tokens(request_id), ids


@pytest.mark.parametrize(("kind", "kv_unified"), CASES)
def test_computed_prefixes_are_reused(kind: Kind, kv_unified: bool) -> None:
    alone = Alone(kind)
    engine = RealEngine(
        SLOTS, path=random_model(kind), flash_attention="off", kv_unified=kv_unified
    )
    some = functools.partial(random_tokens, random.Random(1))
    ask = functools.partial(alone.compared, engine)
    # A conversation continues, and its last turn is repeated.
    prompt = some(150)
    for _ in range(3):
        _, ids = ask(prompt)
        longer = prompt + tuple(ids) + some(40)
        n_cached, _ = ask(longer)
        assert n_cached >= len(prompt) + len(ids) - 1
        n_cached, _ = ask(longer)
        assert n_cached >= len(longer) - 16
        prompt = longer
    # Others share a prefix: the second one reveals it, the third reuses it.
    beginning = some(100)
    ask(beginning + some(60))
    ask(beginning + some(60))
    n_cached, _ = ask(beginning + some(60))
    assert n_cached == len(beginning)


@pytest.mark.parametrize(("kind", "kv_unified"), CASES)
def test_a_prompt_cancelled_within_its_batch_leaves_nothing_wrong(
    kind: Kind, kv_unified: bool
) -> None:
    alone = Alone(kind)
    engine = RealEngine(
        SLOTS, path=random_model(kind), flash_attention="off", kv_unified=kv_unified
    )
    choose = random.Random(2)
    long, short = (random_tokens(choose, n) for n in (400, 60))
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            engine.loop.turn()

    thread = threading.Thread(target=run)
    thread.start()
    for number in range(12):
        beside = engine.submit(short, max_tokens=ANSWER, ignore_eos=True)
        cancelled = engine.submit(long[number:], max_tokens=ANSWER)
        time.sleep(choose.random() * 0.04)
        engine.loop.cancel(cancelled)
        while not engine.has_ended(beside):
            assert thread.is_alive()
            time.sleep(0.002)
        assert engine.have_finished(beside)
        assert alone.differs(short, engine.ids(beside)) is None
    engine.loop.call(is_over.set)
    thread.join()


@pytest.mark.parametrize("refusal", [MemoryError(), OSError(12, "Cannot allocate memory")])
def test_memory_that_the_system_refuses_costs_only_the_copy(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(_n_bytes: int) -> memoryview:
        raise refusal

    engine = RealEngine(2, memory_bytes=1 << 24)
    engine.generate(tuple(range(300, 360)), max_tokens=1)
    monkeypatch.setattr("worker.llama.context._uninitialised", refuse)
    (slot,) = (each for each in engine.cache.slots if each.kept)
    assert engine.cache.save(slot) is not None
    engine.loop.carrier.carry_out(engine.cache.take_moves())
    assert not engine.cache.memory.states


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_no_state_is_read_or_written_where_a_copy_waits(kind: Kind) -> None:
    """llama.cpp makes a copy between the parts of a split pool with the next batch. If a state
    overwrote its source before that, the state would be copied."""
    engine = RealEngine(3, path=random_model(kind), flash_attention="off")
    context, prompt = engine.context, tuple(range(300, 360))
    engine.generate(prompt, max_tokens=1)
    length = context.last_position(0) + 1
    state = context.state(0, context.state_bytes(0))
    assert state is not None and context.copy(0, 2, length)
    assert context.state(2, context.state_bytes(2)) is None, "it is not there yet"
    assert not context.restore(0, state), "it would be written over what is copied"
    engine.cache.start_over(0)
    request_id = engine.submit(tuple(range(700, 720)), max_tokens=1)  # in the slot between
    while not engine.ids(request_id):
        engine.loop.turn()
    copied = context.state(2, context.state_bytes(2))
    assert context.truncate(2, 0) and context.restore(2, state)
    assert copied == context.state(2, context.state_bytes(2))
