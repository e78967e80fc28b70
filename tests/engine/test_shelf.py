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
from worker.wire.messages import Started

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


def test_what_must_be_computed_is_not_taken() -> None:
    engine = pooled()
    ask(engine, 1, b"a" * 40)
    ask(engine, 2, b"x" * 40)
    engine.submit(3, b"a" * 40, max_tokens=2, deterministic=True)
    engine.run()
    assert isinstance(first := engine.events[3][0], Started) and first.cached_tokens == 0


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


def taken(shelf: Shelf, backend: ByteBackend, prompt: bytes, *, is_busy: bool = False) -> int:
    found = shelf.take(sequence(backend, prompt), 0, SECOND_PER_TOKEN, is_busy=is_busy)
    return found.length if found is not None else 0


@pytest.fixture
def backend() -> ByteBackend:
    return ByteBackend(16, CONTEXT, 16 * CONTEXT, 32)


def test_it_is_limited_and_keeps_as_many_as_there_are_slots(backend: ByteBackend) -> None:
    texts = [bytes([number]) * 40 for number in range(6)]
    shelf = Shelf(backend, 4 * 80, 3, Clock())  # 80 bytes each
    slots = slots_of(backend, texts)
    for slot in slots[:5]:
        assert shelf.put_all([slot]) == [slot]
    assert [taken(shelf, backend, text + b"?") for text in texts] == [0, 40, 40, 40, 40, 0]
    shelf = Shelf(backend, 4 * 80, 5, Clock())
    assert [len(shelf.put_all([slot])) for slot in slots] == [1, 1, 1, 1, 0, 0]


def test_one_may_have_a_part_of_it(backend: ByteBackend) -> None:
    (slot,) = slots_of(backend, [b"a" * 40])
    assert Shelf(backend, 4 * 80 - 1, 3, Clock()).put_all([slot]) == []
    assert Shelf(backend, 4 * 80, 3, Clock()).put_all([slot]) == [slot]


def test_what_is_too_short_for_reuse_is_dropped(backend: ByteBackend) -> None:
    (slot,) = slots_of(backend, [b"a" * 31])
    shelf = Shelf(backend, 1 << 20, 3, Clock())
    assert shelf.put_all([slot]) == [slot]
    assert taken(shelf, backend, b"a" * 60) == 0


def test_a_longer_state_replaces_a_shorter_one(backend: ByteBackend) -> None:
    shorter, longer = slots_of(backend, [b"a" * 40, b"a" * 60])
    shelf = Shelf(backend, 4 * 120, 1, Clock())
    assert shelf.put_all([shorter]) and shelf.put_all([longer])
    assert shelf.put_all([shorter]) == [shorter], "the longer one has it"
    assert taken(shelf, backend, b"a" * 90) == 60
    assert taken(shelf, backend, b"a" * 90) == 0, "a state of which all is used has left"


def test_copies_are_made_for_a_limited_time(backend: ByteBackend) -> None:
    slots = slots_of(backend, [bytes([number]) * 40 for number in range(5)])
    shelf = Shelf(backend, 1 << 20, 5, Clock(0.02))
    put = shelf.put_all(slots)
    assert 0 < len(put) < len(slots)
    assert put[0] is slots[-1], "the most recently used first"


def test_a_slow_copy_is_not_waited_for(backend: ByteBackend) -> None:
    (slot,) = slots_of(backend, [b"a" * 40])
    shelf = Shelf(backend, 1 << 20, 5, Clock(0.09))  # of 80 bytes
    assert shelf.put_all([slot]) == [slot]
    prompt = sequence(backend, b"a" * 60)
    assert shelf.take(prompt, 0, 0.001, is_busy=False) is None, "computing takes 0.04 s"
    assert shelf.take(prompt, 0, 0.01, is_busy=False) is not None


def test_a_copy_is_the_faster_until_a_prompt_was_measured(backend: ByteBackend) -> None:
    (slot,) = slots_of(backend, [b"a" * 40])
    shelf = Shelf(backend, 1 << 20, 5, Clock(0.09))
    shelf.put_all([slot])
    assert shelf.take(sequence(backend, b"a" * 60), 0, 0.0, is_busy=False) is not None


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
