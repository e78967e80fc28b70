"""What idle slots keep leaves a pool of cells, and comes back when a prompt goes on from it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from tests.engine.byte_backend import ByteBackend, expected_answer, make_sequence
from tests.engine.real_engine import RealEngine
from tests.engine.test_loop import CONTEXT, Engine
from tests.engine.test_memory_kinds import ANSWER, PLAIN_CASES, Alone
from tests.support.random_models import Kind, random_model
from worker.engine.prefix_cache import Slot
from worker.engine.sequence import Sequence
from worker.engine.shelf import Shelf
from worker.wire.messages import Finished, Started

SECOND_PER_TOKEN = 1.0


def pooled(n_slots: int = 4, **kind: Any) -> Engine:
    engine = Engine(n_slots=n_slots, unified=True, **kind)
    engine.scheduler.pace.seconds_per_prompt_token = SECOND_PER_TOKEN
    return engine


def ask(engine: Engine, request_id: int, prompt: bytes, salt: str | None = None) -> int:
    """Run a request to its right end; returns the number of cached tokens."""
    engine.submit(request_id, prompt, max_tokens=8, cache_salt=salt)
    engine.run()
    assert engine.text(request_id).encode() == expected_answer(prompt, 8, CONTEXT)
    first = engine.events[request_id][0]
    assert isinstance(first, Started)
    return first.cached_tokens


@pytest.mark.parametrize("kind", [{}, {"recurrent": True}, {"window": 8}])
def test_a_prompt_is_computed_beside_no_idle_cells(kind: dict[str, Any]) -> None:
    engine = pooled(**kind)
    prompts = [bytes([ord("a") + number]) * 40 for number in range(3)]
    for number, prompt in enumerate(prompts):
        assert ask(engine, number, prompt) == 0
        assert engine.backend.n_used <= len(prompt) + 8
    for number, prompt in enumerate(prompts):
        longer = prompt + engine.text(number).encode() + b"and more"
        assert ask(engine, 10 + number, longer) >= len(prompt)
        assert engine.backend.n_used <= len(longer) + 8
    engine.check_idle()


def test_a_split_cache_keeps_its_cells() -> None:
    engine = Engine(n_slots=4)
    for number in range(3):
        ask(engine, number, bytes([ord("a") + number]) * 40)
    assert engine.backend.n_used >= 3 * 40


def test_idle_cells_stay_beside_running_streams_that_have_more() -> None:
    engine = pooled()
    engine.submit(1, b"a" * 40, max_tokens=50)
    engine.submit(2, b"b" * 34, max_tokens=2)
    while not engine.scheduler.cells_cached:
        engine.turn()
    assert engine.scheduler.cells_running >= 40
    engine.submit(3, b"c" * 34, max_tokens=2)
    engine.turn()
    assert engine.scheduler.cells_cached >= 34, "most cells are not idle"
    engine.run()


def test_a_conversation_goes_on_in_its_own_cells() -> None:
    engine = pooled()
    prompt = b"a" * 40
    ask(engine, 1, prompt)
    n_cells = engine.backend.n_used
    cached = ask(engine, 2, prompt + engine.text(1).encode() + b"and more")
    assert cached == n_cells, "all that was there"


def test_a_common_beginning_is_taken_from_the_shelf_more_than_once() -> None:
    engine = pooled()
    common = b"system" * 8
    ask(engine, 1, common + b"first question")
    ask(engine, 2, b"x" * 40)
    for number in range(3, 6):
        assert ask(engine, number, common + bytes([ord("0") + number]) * 8) >= len(common)
        ask(engine, 10 + number, bytes([ord("m") + number]) * 40)


def test_tenants_do_not_share_a_shelf() -> None:
    engine = pooled()
    ask(engine, 1, b"a" * 40, "one")
    ask(engine, 2, b"x" * 40, "one")
    assert ask(engine, 3, b"a" * 40 + b"more", "two") == 0
    assert ask(engine, 4, b"a" * 40 + b"more", "one") >= 40
    assert ask(engine, 5, b"x" * 40 + b"more") == 0


def test_a_copy_of_what_is_being_restored_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restore may fail, and then there is nothing to copy."""
    engine = pooled()
    common = b"system" * 8
    ask(engine, 1, common + b"first question")
    ask(engine, 2, b"x" * 40)
    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "restore", lambda slot, state: False)
        for number in (3, 4):
            engine.submit(number, common + bytes([number]) * 9, max_tokens=8)
        engine.run()
    for number in (3, 4):
        expected = expected_answer(common + bytes([number]) * 9, 8, CONTEXT)
        assert engine.text(number).encode() == expected
    ask(engine, 5, b"x" * 40)
    assert ask(engine, 6, common + b"first question and more") >= len(common)


def test_a_state_is_only_restored_where_its_cells_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(n_slots=4, n_cells=150, unified=True)
    engine.scheduler.pace.seconds_per_prompt_token = SECOND_PER_TOKEN
    ask(engine, 1, b"a" * 60 + b"first")
    ask(engine, 2, b"x" * 40)
    engine.submit(3, b"y" * 70, max_tokens=20)
    engine.turn()
    restored: list[bool] = []
    restore = engine.backend.restore

    def counted(slot: int, state: memoryview) -> bool:
        restored.append(restore(slot, state))
        return restored[-1]

    monkeypatch.setattr(engine.backend, "restore", counted)
    prompt = b"a" * 40 + b"again"
    engine.submit(4, prompt, max_tokens=4)
    engine.run()
    assert engine.text(4).encode() == expected_answer(prompt, 4, CONTEXT)
    assert all(restored)


def test_what_must_be_computed_is_not_taken() -> None:
    engine = pooled()
    ask(engine, 1, b"a" * 40)
    ask(engine, 2, b"x" * 40)
    engine.submit(3, b"a" * 40, max_tokens=2, deterministic=True)
    engine.run()
    assert isinstance(first := engine.events[3][0], Started) and first.cached_tokens == 0


@pytest.mark.parametrize("kind", [{}, {"recurrent": True}, {"window": 12}])
def test_conversations_that_come_and_go_say_what_each_says_alone(kind: dict[str, Any]) -> None:
    for seed in range(12):
        converse(random.Random(seed), kind)


def converse(choose: random.Random, kind: dict[str, Any]) -> None:
    """Beginnings, continuations and cancels, several at once, in a pool and a shelf that are too
    small for all of them."""
    engine = Engine(choose.randint(1, 6), choose.choice([100, 200, 400]), unified=True, **kind)
    engine.scheduler.pace.seconds_per_prompt_token = choose.choice([0.0, SECOND_PER_TOKEN])
    common = [bytes(choose.randrange(97, 123) for _ in range(36)) for _ in range(2)] + [b""]
    told = [beginning + b"?" for beginning in common]
    asked: dict[int, tuple[bytes, int]] = {}
    for request_id in range(40):
        prompt = choose.choice(told) + bytes(
            choose.randrange(97, 123) for _ in range(choose.randint(1, 12))
        )
        asked[request_id] = prompt[: CONTEXT - 5], choose.randint(1, 14)
        engine.submit(request_id, asked[request_id][0], max_tokens=asked[request_id][1])
        for _ in range(choose.choice([0, 0, 1, 3, 20])):
            engine.turn()
        if choose.random() < 0.1:
            engine.loop.cancel(choose.randrange(request_id + 1))
        told += [
            prompt + engine.text(other).encode()
            for other, (prompt, _) in list(asked.items())[-3:]
            if engine.events[other] and isinstance(engine.events[other][-1], Finished)
        ]
    engine.run()
    for request_id, (prompt, max_tokens) in asked.items():
        expected = expected_answer(prompt, max_tokens, CONTEXT)
        if isinstance(engine.end(request_id), Finished):
            assert engine.text(request_id).encode() == expected
        else:
            assert expected.startswith(engine.text(request_id).encode())
    engine.check_idle()


# --- the shelf itself ------------------------------------------------------------------------


class Clock:
    """Each look costs a time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def slots_of(backend: ByteBackend, texts: Iterable[bytes]) -> list[Slot]:
    slots = []
    for index, text in enumerate(texts):
        backend.cells[index] = list(text)
        slots.append(Slot(index, kept=list(text), last_used=index))
    return slots


def sequence(backend: ByteBackend, prompt: bytes) -> Sequence:
    return make_sequence(backend, 1, prompt)


def taken(shelf: Shelf, backend: ByteBackend, prompt: bytes, most_cells: int = 1000) -> int:
    found = shelf.find(sequence(backend, prompt), None, most_cells, SECOND_PER_TOKEN)
    return found.length if found is not None else 0


def put(shelf: Shelf, slot: Slot, slots: list[Slot]) -> bool:
    return shelf.put_all([slot], slots, is_busy=True) == [slot]


@pytest.fixture
def backend() -> ByteBackend:
    return ByteBackend(16, CONTEXT, 16 * CONTEXT, 32)


def test_it_is_limited_and_the_oldest_gives_way(backend: ByteBackend) -> None:
    texts = [bytes([number]) * 40 for number in range(6)]
    slots = slots_of(backend, texts)
    shelf = Shelf(backend, 4 * 80, Clock())  # 80 bytes each
    for slot in slots:
        assert put(shelf, slot, slots[:3])
        slot.kept = []
    assert [taken(shelf, backend, text + b"?") for text in texts] == [0, 0, 40, 40, 40, 40]


def test_none_gives_way_that_the_slots_would_still_have(backend: ByteBackend) -> None:
    slots = slots_of(backend, [bytes([number]) * 40 for number in range(6)])
    shelf = Shelf(backend, 4 * 80, Clock())
    for slot in slots[:4]:
        assert put(shelf, slot, slots)
        slot.kept = []
    assert not put(shelf, slots[4], slots)
    other = Slot(7, kept=[1], last_used=9)
    assert not put(shelf, slots[4], [*slots, other]), "6 of 7 were used later than the first"
    assert put(shelf, slots[4], [*slots[1:], other]), "6 of 6"


def test_one_may_have_a_part_of_it(backend: ByteBackend) -> None:
    (slot,) = slots_of(backend, [b"a" * 40])
    assert not put(Shelf(backend, 4 * 80 - 1, Clock()), slot, [slot])
    assert put(Shelf(backend, 4 * 80, Clock()), slot, [slot])


def test_what_is_too_short_for_reuse_is_dropped(backend: ByteBackend) -> None:
    (slot,) = slots_of(backend, [b"a" * 31])
    shelf = Shelf(backend, 1 << 20, Clock())
    assert put(shelf, slot, [slot])
    assert taken(shelf, backend, b"a" * 60) == 0


def test_a_longer_state_replaces_a_shorter_one(backend: ByteBackend) -> None:
    slots = slots_of(backend, [b"a" * 40, b"a" * 60])
    shelf = Shelf(backend, 4 * 120, Clock())
    assert put(shelf, slots[0], slots) and put(shelf, slots[1], slots)
    assert put(shelf, slots[0], slots), "the longer one has it"
    assert taken(shelf, backend, b"a" * 90) == 60
    assert taken(shelf, backend, b"a" * 90, most_cells=59) == 0, "it needs room for all of it"


def test_a_longer_state_that_cannot_be_cut_replaces_none() -> None:
    backend = ByteBackend(16, CONTEXT, 16 * CONTEXT, 32, recurrent=True)
    slots = slots_of(backend, [b"a" * 40, b"a" * 60])
    backend.states = {slot.index: list(slot.kept) for slot in slots}
    shelf = Shelf(backend, 1 << 20, Clock())
    assert put(shelf, slots[0], slots) and put(shelf, slots[1], slots)
    assert taken(shelf, backend, b"a" * 40 + b"b" * 20) == 40
    assert taken(shelf, backend, b"a" * 60 + b"b" * 20) == 60


def test_copies_beside_streams_are_made_for_a_limited_time(backend: ByteBackend) -> None:
    slots = slots_of(backend, [bytes([number]) * 40 for number in range(5)])
    shelf = Shelf(backend, 1 << 20, Clock(0.02))
    done = shelf.put_all(slots, slots, is_busy=True)
    assert 0 < len(done) < len(slots)
    assert done[0] is slots[-1], "the most recently used first"


def test_all_but_the_most_recent_are_copied_while_nothing_runs(backend: ByteBackend) -> None:
    texts = [bytes([number]) * 40 for number in range(3)]
    slots = slots_of(backend, texts)
    shelf, looks = Shelf(backend, 1 << 20, Clock()), iter([True, False])
    shelf.copy_while(slots, lambda: next(looks))
    assert [taken(shelf, backend, text + b"?") for text in texts] == [40, 0, 0], "a request came"
    shelf.copy_while(slots, lambda: True)
    assert [taken(shelf, backend, text + b"?") for text in texts] == [40, 40, 0]
    assert all(slot.kept for slot in slots), "they stay in their cells until another needs the pool"
    none = Shelf(backend, 0, Clock())
    none.copy_while(slots, lambda: True)
    assert taken(none, backend, texts[0] + b"?") == 0


def test_one_slow_copy_is_forgiven(backend: ByteBackend) -> None:
    clock = Clock(90.0)
    slots = slots_of(backend, [bytes([number]) * 40 for number in range(3)])
    shelf = Shelf(backend, 1 << 20, clock)
    assert put(shelf, slots[0], slots)
    clock.seconds = 0.0
    assert put(shelf, slots[1], slots) and put(shelf, slots[2], slots)


def test_a_slow_copy_is_not_waited_for(backend: ByteBackend) -> None:
    (slot,) = slots_of(backend, [b"a" * 40])
    shelf = Shelf(backend, 1 << 20, Clock(0.09))
    for _ in range(40):  # 80 bytes take 0.09 seconds, again and again
        slot.kept = [*slot.kept[1:], slot.kept[0] ^ 1]
        backend.cells[0] = slot.kept
        shelf.put_all([slot], [slot], is_busy=False)
    prompt = sequence(backend, bytes(slot.kept) + b"b" * 20)
    assert shelf.find(prompt, None, 1000, 0.001) is None, "computing takes 0.04 s"
    assert shelf.find(prompt, None, 1000, 0.01) is not None
    assert shelf.find(prompt, None, 1000, 0.0) is not None, "nobody knows what computing takes"


# --- llama.cpp -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind, kv_unified in PLAIN_CASES if kv_unified])
def test_conversations_in_turn_say_what_each_says_alone(kind: Kind) -> None:
    choose, alone = random.Random(7), Alone(kind)
    engine = RealEngine(4, path=random_model(kind), flash_attention="off", kv_unified=True)

    def some(n: int) -> tuple[int, ...]:
        return tuple(choose.randrange(300, 1000) for _ in range(n))

    told = [some(120) for _ in range(5)]  # more than there are slots
    for turn in range(3):
        for number, so_far in enumerate(told):
            request_id = engine.submit(so_far, max_tokens=ANSWER, ignore_eos=True)
            engine.run()
            answer = engine.ids(request_id)
            assert alone.differs(so_far, answer) is None
            assert engine.cached_tokens(request_id) >= (len(so_far) - 20 if turn else 0)
            assert engine.scheduler.cells_cached < len(so_far) + ANSWER, "only its own"
            told[number] = so_far + tuple(answer) + some(10)
    engine.close()
    alone.close()
