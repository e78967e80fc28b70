"""Prefixes that outlive their engine: when they are stored, and what goes on from them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.byte_backend import expected_answer
from tests.engine.real_engine import RealEngine
from tests.engine.test_kv_files import files, opened, until
from tests.engine.test_loop import Engine
from tests.engine.test_memory_kinds import ANSWER, PLAIN_CASES, Alone
from tests.support.random_models import Kind, random_model
from worker.engine.kv_store.keeper import MOST_SECONDS, Keeper
from worker.engine.kv_store.store import KvStore
from worker.engine.loop import Loop
from worker.engine.prefix_cache import Slot
from worker.engine.scheduler import Scheduler
from worker.wire.messages import Failed, Started

# --- when ------------------------------------------------------------------------------------


class SlowMemory:
    """A backend of which a state of a gibibyte is copied in four seconds."""

    cuts_anywhere = True

    def __init__(self) -> None:
        self.now = 0.0
        self.copied: list[int] = []
        self.n_bytes = 1 << 30

    def can_cut(self, slot: int, length: int) -> bool:
        return True

    def state_bytes(self, slot: int) -> int:
        return self.n_bytes

    def state(self, slot: int, n_bytes: int) -> memoryview:
        self.now += n_bytes / (1 << 28)
        self.copied.append(slot)
        return memoryview(b"small after all")


def test_a_copy_that_streams_would_wait_for_is_made_when_none_runs(tmp_path: Path) -> None:
    memory = SlowMemory()
    store = opened(tmp_path, limit_bytes=8 << 30)
    keeper = Keeper(store, memory, lambda: memory.now)  # type: ignore[arg-type]
    keeper.call = lambda action: action()
    slots = [Slot(0, kept=list(range(50)), is_unsaved=True)]
    keeper.keep(slots, is_busy=True)
    assert memory.copied == []
    keeper.keep(slots, is_busy=False)
    assert memory.copied == [0] and not slots[0].is_unsaved
    until(lambda: not keeper.is_writing)
    # What the last copy took tells what the next one would.
    for n_bytes, fits in ((int(1.1 * MOST_SECONDS * (1 << 28)), False), (1 << 24, True)):
        memory.n_bytes = n_bytes
        slots = [Slot(1, None, list(range(n_bytes % 1000, 2000)), last_used=n_bytes)]
        slots[0].is_unsaved = True
        keeper.keep(slots, is_busy=True)
        assert (memory.copied[-1] == 1) is fits
    until(lambda: not keeper.is_writing)


def test_what_takes_more_than_a_quarter_of_the_folder_is_not_stored(tmp_path: Path) -> None:
    memory = SlowMemory()
    keeper = Keeper(opened(tmp_path, 4 << 30), memory)  # type: ignore[arg-type]
    memory.n_bytes += 1
    slots = [Slot(0, kept=list(range(50)), is_unsaved=True)]
    keeper.keep(slots, is_busy=False)
    assert memory.copied == [] and not slots[0].is_unsaved


# --- on the real engine ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "kv_unified"), PLAIN_CASES)
def test_a_conversation_goes_on_in_the_next_engine(
    tmp_path: Path, kind: Kind, kv_unified: bool
) -> None:
    choose = random.Random(3)
    alone = Alone(kind)

    def engine(binding: str = "one") -> RealEngine:
        return RealEngine(
            path=random_model(kind),
            flash_attention="off",
            kv_unified=kv_unified,
            store=tmp_path,
            binding=binding,
        )

    def some(n: int) -> tuple[int, ...]:
        return tuple(choose.randrange(300, 1000) for _ in range(n))

    def ask(engine: RealEngine, prompt: tuple[int, ...]) -> tuple[int, list[int]]:
        request_id = engine.submit(prompt, max_tokens=ANSWER, ignore_eos=True)
        engine.run()
        ids = engine.ids(request_id)
        assert alone.differs(prompt, ids) is None
        return engine.cached_tokens(request_id), ids

    first, second, third = engine(), engine("two"), None
    prompts = [some(200), some(200)]
    told = [prompt + tuple(ask(first, prompt)[1]) for prompt in prompts]
    assert ask(second, told[0] + some(10))[0] == 0, "of another layout"
    first.close()
    second.close()
    third = engine()
    for prompt, so_far in zip(prompts, told, strict=True):
        longer = so_far + some(10)
        n_cached, _ = ask(third, longer)
        assert n_cached >= 0.95 * len(longer)
        # Another answer to the same words: a beginning of what is stored.
        n_cached, _ = ask(third, prompt)
        assert n_cached >= len(prompt) - 16
    assert third.stats is not None and third.stats.kv_store_read > 0
    third.close()
    for path in files(tmp_path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    fourth = engine()
    assert ask(fourth, told[0] + some(10))[0] == 0, "it is damaged"
    fourth.close()
    alone.close()


# --- in the loop -----------------------------------------------------------------------------


@dataclass
class StoringEngine(Engine):
    folder: Path = Path()

    def __post_init__(self) -> None:
        super().__post_init__()
        anywhere = self.backend.cuts_anywhere
        store = KvStore(self.folder, 1 << 20, cuts_anywhere=anywhere, bind=lambda _: "bytes")
        self.keeper = Keeper(store, self.backend)
        self.scheduler = Scheduler(self.scheduler.limits, self.backend, self.keeper)
        self.loop = Loop(self.backend, self.scheduler, self._receive, keeper=self.keeper)

    def drain(self) -> None:
        """Until all is computed and stored."""
        self.turn()
        while self.scheduler.waiting or self.scheduler.running or self.keeper.is_writing:
            assert self.loop.turn()
        self.check_idle()


def started(engine: Engine, request_id: int) -> Started:
    first = engine.events[request_id][0]
    assert isinstance(first, Started)
    return first


@pytest.mark.parametrize("options", [{}, {"recurrent": True}, {"window": 8}])
def test_more_conversations_than_slots_are_found_again(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The store also brings back what slots had to give up, beside running streams."""
    engine = StoringEngine(folder=tmp_path, n_slots=2, n_cells=150, **options)
    prompts = [bytes([ord("a") + number]) * 40 + b"?" for number in range(5)]
    for number, prompt in enumerate(prompts):
        engine.submit(number, prompt, max_tokens=8)
        engine.drain()
    longer = []
    for number, prompt in enumerate(prompts):
        longer.append(prompt + engine.text(number).encode() + b"and more")
        engine.submit(10 + number, longer[-1], max_tokens=8)
    engine.drain()
    for number, prompt in enumerate(longer):
        assert engine.text(10 + number).encode() == expected_answer(prompt, 8, 96)
        assert started(engine, 10 + number).cached_tokens >= len(prompts[number]) - 16


def test_a_request_that_is_cancelled_while_its_beginning_is_read(tmp_path: Path) -> None:
    engine = StoringEngine(folder=tmp_path, n_slots=1)
    engine.submit(1, b"a" * 40, max_tokens=4)
    engine.drain()
    engine = StoringEngine(folder=tmp_path, n_slots=1)
    engine.submit(2, b"a" * 40 + b"more", max_tokens=4)
    engine.turn()  # which asks for it
    assert engine.scheduler.waiting and not engine.scheduler.has_work
    engine.loop.cancel(2)
    engine.submit(3, b"a" * 40 + b"less", max_tokens=4)
    engine.drain()
    assert isinstance(engine.events[2][-1], Failed)
    assert engine.text(3).encode() == expected_answer(b"a" * 40 + b"less", 4, 96)
