"""Cells of idle slots go to memory, and are restored when a prompt continues from them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_models import Kind, random_model
from tests.support.real_engine import RealEngine, random_tokens
from tests.unit.engine import test_loop
from tests.unit.engine.test_loop import Engine, answered_with
from tests.unit.engine.test_memory_kinds import ANSWER, CASES, Alone
from worker.engine.cache.memory import MOST_STATES, Memory
from worker.engine.cache.moves import Snapshot, State
from worker.engine.cache.slots import Slot, count_cells, share, unshare
from worker.llama.memory_kind import MemoryKind
from worker.wire.adapters import Scope

SECOND_PER_TOKEN = 1.0


def pooled(**limits: Any) -> Engine:
    engine = Engine(unified=True, **limits)
    engine.scheduler.pace.seconds_per_prompt_token = SECOND_PER_TOKEN
    return engine


@pytest.mark.parametrize("kind", [{}, {"recurrent": True}, {"window": 8}])
@pytest.mark.parametrize("unified", [False, True])
def test_evicted_cells_are_restored(unified: bool, kind: dict[str, Any]) -> None:
    """In one pool, each prompt is computed without idle cells."""
    engine = Engine(n_slots=2, unified=unified, memory_bytes=4000, **kind)
    engine.scheduler.pace.seconds_per_prompt_token = SECOND_PER_TOKEN
    prompts = [bytes([ord("a") + number]) * 40 for number in range(5)]
    for number, prompt in enumerate(prompts):
        assert engine.ask(number, prompt) == 0
        assert not unified or engine.runner.n_used <= len(prompt) + 8
    for number, prompt in enumerate(prompts):
        longer = prompt + engine.text(number).encode() + b"and more"
        assert engine.ask(10 + number, longer) >= len(prompt)
        assert not unified or engine.runner.n_used <= len(longer) + 8
    engine.check_idle()


def test_a_common_prefix_is_taken_from_memory_more_than_once() -> None:
    engine = pooled()
    common = b"system" * 8
    engine.ask(1, common + b"first question")
    engine.ask(2, b"x" * 40)
    for number in range(3, 6):
        assert engine.ask(number, common + bytes([ord("0") + number]) * 8) >= len(common)
        engine.ask(10 + number, bytes([ord("m") + number]) * 40)


def test_a_copy_from_cells_that_are_being_restored_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restore may fail, and then there is nothing to copy."""
    engine = pooled()
    common = b"system" * 8
    engine.ask(1, common + b"first question")
    engine.ask(2, b"x" * 40)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "restore", lambda slot, state: False)
        for number in (3, 4):
            engine.submit(number, common + bytes([number]) * 9, max_tokens=8)
        engine.run()
    assert engine.have_finished(3, 4)
    engine.ask(5, b"x" * 40)
    assert engine.ask(6, common + b"first question and more") >= len(common)


def test_a_state_is_only_restored_when_its_cells_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pooled(n_cells=150)
    engine.ask(1, b"a" * 60 + b"first")
    engine.ask(2, b"x" * 40)
    engine.submit(3, b"y" * 70, max_tokens=20)
    engine.turn()
    restored: list[bool] = []
    restore = engine.runner.restore

    def counted(slot: int, state: memoryview) -> bool:
        restored.append(restore(slot, state))
        return restored[-1]

    monkeypatch.setattr(engine.runner, "restore", counted)
    prompt = b"a" * 40 + b"again"
    engine.submit(4, prompt, max_tokens=4)
    engine.run()
    assert engine.have_finished(4) and all(restored)


# --- what gives way --------------------------------------------------------------------------


def test_memory_keeps_a_limited_number_of_states() -> None:
    slots = [Slot(0)]
    slots[0].snapshots = [Snapshot(1, b"old")]
    memory = Memory(1 << 30, slots, MemoryKind())
    for number in range(MOST_STATES + 10):
        state = State([number], Scope(), 40, memoryview(b""), last_used=number + 1)
        assert memory.keep(state)
    assert [state.tokens[0] for state in memory.states] == list(range(10, MOST_STATES + 10))
    assert slots[0].snapshots, "it takes no state's place"


def test_cells_that_are_evicted_next_are_copied_while_nothing_runs() -> None:
    engine = pooled()
    for number in range(2):
        engine.ask(number, bytes([ord("a") + number]) * 40)
    engine.cache.memory.states.clear()
    looks = iter([True, True, False])
    engine.loop.carrier.save_while(lambda: next(looks))
    assert not engine.cache.memory.states, "the most recent one alone stays in its cells"
    split = Engine(n_slots=2)
    for number in range(2):
        split.ask(number, bytes([ord("a") + number]) * 40)
    split.loop.carrier.save_while(lambda: True)
    assert [state.tokens[0] for state in split.cache.memory.states] == [ord("a")]
    split.check()


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("at_once", [1, 8, 20])
@pytest.mark.parametrize("n_system", [60, 250])
def test_agents_compute_only_what_is_new(
    unified: bool, at_once: int, n_system: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty conversations with several turns in eight slots. Because of a long common prefix, each
    could take over the cells of another, whose own part must not be lost."""
    monkeypatch.setattr(test_loop, "CONTEXT", 512)
    engine = Engine(
        n_slots=8,
        n_cells=8 * 512,
        unified=unified,
        memory_bytes=1 << 20,
        batch=512,
        prefill_budget=256,
    )
    if not unified:  # there a common prefix is copied
        engine.cache.limits = replace(engine.cache.limits, copy_seconds=10 * SECOND_PER_TOKEN)
    engine.scheduler.pace.seconds_per_prompt_token = SECOND_PER_TOKEN
    choose = random.Random(3)
    system = choose.randbytes(n_system)
    conversations = [system + choose.randbytes(60) for _ in range(20)]
    n_turns, live = [0] * 20, dict[int, int]()
    n_prompt = 0
    for request_id in range(20 * 5):
        while len(live) == at_once:
            engine.turn()
            for ended in [r for r in live if engine.has_ended(r)]:
                number = live.pop(ended)
                conversations[number] += engine.text(ended).encode() + choose.randbytes(20)
        number = min(set(range(20)) - set(live.values()), key=lambda each: n_turns[each])
        n_turns[number] += 1
        live[request_id] = number
        n_prompt += len(conversations[number])
        engine.submit(request_id, conversations[number], max_tokens=10)
    engine.run()
    n_cached = sum(map(engine.cached_tokens, range(20 * 5)))
    # Each turn has 30 new tokens, the first ones 60 and the common prefix.
    n_new = n_system + 20 * 60 + 80 * 30
    assert n_prompt - n_cached < 1.1 * n_new


# --- which cells are shared ------------------------------------------------------------------


@given(st.data())
def test_shared_cells_are_counted_once_whoever_leaves_first(data: st.DataObject) -> None:
    slots = [Slot(index) for index in range(5)]
    cells: dict[int, list[int]] = {slot.index: [] for slot in slots}
    numbers = count()

    def sizes(slot: Slot) -> int:
        return len(cells[slot.index])

    for _ in range(data.draw(st.integers(1, 25))):
        slot = data.draw(st.sampled_from(slots))
        held = cells[slot.index]
        match data.draw(st.sampled_from(["grow", "cut", "copy"])):
            case "grow":
                held += [next(numbers) for _ in range(data.draw(st.integers(1, 9)))]
            case "cut":
                length = data.draw(st.integers(0, len(held)))
                unshare(slot, length, slots)
                del held[length:]
            case "copy":
                empty = [each for each in slots if not cells[each.index]]
                if empty and held and empty[0] is not slot:
                    length = data.draw(st.integers(1, len(held)))
                    share(slot, empty[0], length, slots)
                    cells[empty[0].index] = held[:length]
        some = data.draw(st.lists(st.sampled_from(slots), unique=True))
        expected = len({cell for each in some for cell in cells[each.index]})
        assert count_cells(some, sizes) == expected


# --- llama.cpp -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind, kv_unified in CASES if kv_unified])
def test_alternating_conversations_have_the_same_texts_as_alone(kind: Kind) -> None:
    some, alone = partial(random_tokens, random.Random(7)), Alone(kind)
    engine = RealEngine(4, path=random_model(kind), flash_attention="off", kv_unified=True)
    engine.loop.carrier._clock = lambda: 0.0  # copies are worth it, however busy the machine is
    conversations = [some(120) for _ in range(5)]  # more than there are slots
    for turn in range(3):
        for number, so_far in enumerate(conversations):
            n_cached, answer = alone.compared(engine, so_far)
            assert n_cached >= (len(so_far) - 20 if turn else 0)
            assert engine.cache.cells_cached < len(so_far) + ANSWER, "only its own"
            conversations[number] = so_far + tuple(answer) + some(10)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_copy_and_a_state_that_come_together_do_not_mix(kind: Kind) -> None:
    """llama.cpp copies between the parts of a split pool with the next batch, but writes a state at
    once: it would overwrite cells still to be copied if both were planned together."""
    some, alone = partial(random_tokens, random.Random(7)), Alone(kind)
    engine = RealEngine(2, path=random_model(kind), flash_attention="off")
    saved, other, longest = some(150), some(150), some(300)
    for prompt in (saved, other, longest):  # the third takes the slot of the first
        engine.generate(prompt, max_tokens=8, ignore_eos=True)
    for n_common in (0, 100):  # the second shows where to cut hybrid memory
        engine.generate(longest[:n_common] + some(60), max_tokens=8, ignore_eos=True)
        engine.generate(longest + some(5), max_tokens=8, ignore_eos=True)
    prompts = [longest[:100] + some(30), saved + some(30)]
    ids = [engine.submit(prompt, max_tokens=ANSWER, ignore_eos=True) for prompt in prompts]
    engine.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert alone.differs(prompt, engine.ids(request_id)) is None
    assert [engine.cached_tokens(each) for each in ids] == [100, 150 if kind == "dense" else 134]


# --- requests that wait ----------------------------------------------------------------------


def test_a_request_does_not_start_before_it_fits() -> None:
    """Shared cells belong to the remaining stream once the other is gone."""
    engine = Engine(n_slots=3, n_cells=110, unified=True)
    common = b"system" * 8
    engine.submit(1, answered_with(20, common)[0], max_tokens=20)
    engine.turn()
    engine.submit(2, answered_with(30, common + b"another")[0], max_tokens=30)
    while not engine.text(2):
        engine.turn()
    assert engine.cached_tokens(2) == len(common)
    engine.loop.cancel(1)
    engine.turn()
    engine.submit(3, bytes(60), max_tokens=4)
    engine.turn()
    assert engine.scheduler.waiting, "58 of 110 cells are the stream's"
    engine.run()
    assert engine.computes_nothing_twice()
