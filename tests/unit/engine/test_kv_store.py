"""Prefixes that outlive their engine: when they are stored and reused."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.byte_runner import make_sequence
from tests.support.random_models import Kind, random_model
from tests.support.real_engine import RealEngine, random_tokens
from tests.unit.engine.test_kv_files import files
from tests.unit.engine.test_loop import Engine
from tests.unit.engine.test_memory_kinds import CASES, Alone
from worker.wire.messages import Failed

# --- on the real engine ----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "kv_unified"), CASES)
def test_a_conversation_continues_in_the_next_engine(
    tmp_path: Path, kind: Kind, kv_unified: bool
) -> None:
    some, alone = partial(random_tokens, random.Random(3)), Alone(kind)

    def engine(binding: str = "one") -> RealEngine:
        return RealEngine(
            path=random_model(kind),
            flash_attention="off",
            kv_unified=kv_unified,
            store=tmp_path,
            binding=binding,
        )

    ask = alone.compared
    first, second = engine(), engine("two")
    prompts = [some(200), some(200)]
    conversations = [prompt + tuple(ask(first, prompt)[1]) for prompt in prompts]
    assert ask(second, conversations[0] + some(10))[0] == 0, "of another layout"
    first.close()
    second.close()
    third = engine()
    for prompt, so_far in zip(prompts, conversations, strict=True):
        longer = so_far + some(10)
        n_cached, _ = ask(third, longer)
        assert n_cached >= 0.95 * len(longer)
        # Another answer to the same words: a prefix of what is stored.
        n_cached, _ = ask(third, prompt)
        assert n_cached >= len(prompt) - 16
    third.close()
    for path in files(tmp_path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    fourth = engine()
    assert ask(fourth, conversations[0] + some(10))[0] == 0, "it is damaged"


# --- in the loop -----------------------------------------------------------------------------


def keep(engine: Engine, request_id: int, prompt: bytes, max_tokens: int = 4) -> None:
    """Answer a prompt, and wait until everything is stored."""
    engine.submit(request_id, prompt, max_tokens=max_tokens)
    engine.drain()


@pytest.mark.parametrize("options", [{}, {"recurrent": True}, {"window": 8}])
def test_more_conversations_than_slots_are_found_again(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The store also restores what slots had to evict, beside running streams."""
    engine = Engine(folder=tmp_path, n_slots=2, **options)
    prompts = [bytes([ord("a") + number]) * 40 + b"?" for number in range(5)]
    for number, prompt in enumerate(prompts):
        keep(engine, number, prompt, max_tokens=8)
    for number, prompt in enumerate(prompts):
        longer = prompt + engine.text(number).encode() + b"and more"
        engine.submit(10 + number, longer, max_tokens=8)
    engine.drain()
    assert engine.have_finished(*range(10, 10 + len(prompts)))
    for number, prompt in enumerate(prompts):
        assert engine.cached_tokens(10 + number) >= len(prompt) - 16


def test_a_slow_copy_is_made_when_no_stream_runs(tmp_path: Path) -> None:
    engine = Engine(folder=tmp_path)
    engine.submit(1, b"a" * 40, max_tokens=4)
    engine.submit(2, b"stream", max_tokens=40)
    engine.cache.copying.per_byte = 0.01  # 80 bytes in 0.8 s
    while len(engine.text(2)) < 30:
        engine.turn()
    assert not engine.cache.memory.states
    engine.drain()
    assert len(files(tmp_path)) == 2, "the stream's own, too"


def test_a_file_is_read_only_if_all_of_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(folder=tmp_path, n_slots=1)
    keep(engine, 1, b"a" * 80)
    engine = Engine(4, 200, unified=True, divisions=(4,), folder=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(engine.traffic.disk, "read", lambda *_: pytest.fail("a part has 50 cells"))
        keep(engine, 2, b"a" * 45, max_tokens=1)
    keep(engine, 3, b"a" * 80 + b"more", max_tokens=1)
    assert engine.cached_tokens(3) >= 80


def after_another(
    folder: Path, n_slots: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, list[Callable[[], None]]]:
    """An engine that finds two prompts of another one, and its pending reads."""
    engine = Engine(folder=folder, n_slots=1)
    for number, prompt in enumerate((b"a" * 40, b"b" * 40)):
        keep(engine, number, prompt)
    engine = Engine(folder=folder, n_slots=n_slots)
    begun: list[Callable[[], None]] = []
    disk = engine.traffic.disk
    read = disk.read
    monkeypatch.setattr(disk, "read", lambda *of: begun.append(lambda: read(*of)))
    return engine, begun


def test_a_read_for_which_no_request_waits_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its request was cancelled or served by another read, the next read begins, and the result
    serves later requests."""
    engine, begun = after_another(tmp_path, 3, monkeypatch)
    traffic, memory = engine.traffic, engine.cache.memory
    engine.submit(1, b"a" * 40 + b"first", max_tokens=4)
    engine.submit(2, b"a" * 40 + b"second", max_tokens=4)
    engine.submit(3, b"b" * 40 + b"third", max_tokens=4)
    engine.turn()
    assert traffic.is_reading and len(begun) == 1 and len(engine.scheduler.waiting) == 3
    engine.loop.cancel(1)
    engine.turn()
    assert isinstance(engine.end(1), Failed) and traffic.is_reading
    begun[0]()
    while len(begun) < 2:  # the second uses what was read for the first
        engine.turn()
    assert memory.locked_bytes == 0 and memory.states
    while not engine.has_ended(2):
        engine.turn()
    assert engine.cached_tokens(2) >= 40
    assert not engine.scheduler.has_work, "the loop sleeps while the third is read"
    begun[1]()
    engine.drain()
    assert engine.have_finished(2, 3) and engine.cached_tokens(3) >= 40 and len(begun) == 2
    assert not engine.traffic.is_reading and memory.locked_bytes == 0


def test_nobody_waits_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests are computed; once the disk responds, it is used again."""
    engine, begun = after_another(tmp_path, 2, monkeypatch)
    texts = {1: b"a" * 40 + b"first", 2: b"b" * 40 + b"second", 3: b"b" * 40 + b"third"}
    for number, prompt in texts.items():
        engine.submit(number, prompt, max_tokens=4)
    engine.turn()
    assert len(engine.scheduler.waiting) == 3
    engine.now += 60
    engine.drain()
    assert engine.have_finished(*texts)
    assert len(begun) == 1, "the others do not wait behind it"
    keep(engine, 4, b"c" * 40)
    begun[0]()
    while engine.traffic.is_reading:
        engine.turn()
    engine = Engine(folder=tmp_path, n_slots=1)
    keep(engine, 5, b"c" * 40 + b"more")
    assert engine.cached_tokens(5) >= 40


def test_nobody_waits_for_the_memory_of_a_write_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begun = after_another(tmp_path, 2, monkeypatch)
    written: list[Callable[[], None]] = []
    monkeypatch.setattr(engine.traffic.disk, "write", lambda _, done: written.append(done))
    engine.cache.memory.most_bytes = 350
    engine.submit(1, b"c" * 40, max_tokens=4)
    while not written:
        engine.turn()
    engine.submit(2, b"a" * 40 + b"more", max_tokens=4)
    engine.turn()
    assert engine.scheduler.waiting and not begun
    engine.now += 60
    engine.turn()
    engine.submit(3, b"b" * 40 + b"more", max_tokens=4)
    engine.turn()
    assert len(engine.scheduler.running) == 2 and not begun, "nor does the third"
    engine.loop.cancel(3)
    written.pop()()
    engine.turn()
    engine.submit(4, b"b" * 40 + b"else", max_tokens=4)
    engine.turn()
    begun[0]()
    while not all(engine.has_ended(number) for number in (1, 2, 4)):
        engine.turn()
    assert engine.have_finished(1, 2, 4) and engine.cached_tokens(4) >= 40


def test_a_request_that_waits_for_the_disk_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the idle engine reports that it is alive."""
    engine, _ = after_another(tmp_path, 1, monkeypatch)
    engine.submit(1, b"a" * 40 + b"more", max_tokens=4, deadline=1.0)
    engine.turn()
    stats = engine.stats
    engine.loop.turn()
    assert engine.stats is not stats and engine.scheduler.waiting
    engine.now = 1.0
    engine.loop.turn()
    assert isinstance(engine.end(1), Failed)


def test_a_disk_that_was_slow_for_a_while_is_tried_again(tmp_path: Path) -> None:
    keep(Engine(folder=tmp_path, n_slots=1), 1, b"a" * 40)
    engine = Engine(folder=tmp_path)
    engine.scheduler.pace.seconds_per_prompt_token = 0.01
    engine.cache.reading.paid(100, 60.0)
    sequences = [make_sequence(number, b"a" * 40 + b"more") for number in range(200)]
    for sequence in sequences:
        engine.traffic.look_up(sequence)
    waiting = [sequence.awaits_disk for sequence in sequences]
    assert not any(waiting[:20]) and waiting[-1]
