"""The choice of a worker for a prompt."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.fleet.scripted import at
from worker.fleet.affinity import key_of, ranked
from worker.fleet.workers import Worker, WorkerTable

NAMES = st.lists(st.text(min_size=1), min_size=2, max_size=8, unique=True)


@given(st.text(), NAMES)
def test_a_worker_that_goes_moves_only_its_own_keys(key: str, names: list[str]) -> None:
    order = ranked(key, names)
    assert sorted(order) == sorted(names)
    for gone in names:
        left = [name for name in names if name != gone]
        assert ranked(key, left) == [name for name in order if name != gone]


def test_keys_spread_evenly() -> None:
    names = [f"worker-{n}" for n in range(3)]
    firsts = Counter(ranked(f"prompt {n}", names)[0] for n in range(3000))
    # Binomial with p = 1/3: a standard deviation is 26.
    assert all(abs(count - 1000) < 150 for count in firsts.values())


def test_a_conversation_keeps_its_key() -> None:
    system = {"role": "system", "content": "Be brief."}
    first = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    turns = [
        system,
        first,
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "x"},
    ]
    assert key_of({"messages": turns[:2]}) == key_of({"messages": turns})
    assert key_of({"messages": turns[:2]}) != key_of({"messages": [system, turns[3]]})
    assert key_of({"instructions": "Be brief.", "input": "Hello"}) is not None
    long = "a" * 300
    assert key_of({"prompt": long + "b"}) == key_of({"prompt": long + "c"})
    assert key_of({"prompt": "b"}) != key_of({"prompt": "b", "cache_salt": "s"})


@settings(max_examples=30)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_no_body_is_too_strange(value: object) -> None:
    for name in ("messages", "input", "prompt", "system", "instructions"):
        key_of({name: value})
        key_of({name: value, "messages": [value, {"content": value}], "input": [value]})


def table_with(n_workers: int, n_slots: int = 4) -> WorkerTable:
    table = WorkerTable()
    table.replace(
        "tiny", at({f"w{n}": f"http://127.0.0.1:{n}" for n in range(n_workers)}, n_slots=n_slots)
    )
    return table


def chosen(table: WorkerTable, key: str) -> Worker:
    worker = table.choose("tiny", key, ())
    assert worker is not None
    return worker


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(1, 16), st.integers(1, 80))
def test_a_prefix_that_all_share_is_spread(n_workers: int, n_slots: int, n_requests: int) -> None:
    table = table_with(n_workers, n_slots)
    for n in range(1, n_requests + 1):
        chosen(table, "shared").running.append("shared")
        loads = [len(worker.running) for worker in table.workers()]
        assert max(loads) <= math.ceil(1.25 * n / n_workers)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.randoms(use_true_random=False))
def test_conversations_that_fit_the_slots_stay_where_they_are(
    n_workers: int, n_slots: int, random: Random
) -> None:
    """In any order of their turns, including concurrent ones."""
    table = table_with(n_workers, n_slots)
    names = [f"conversation {n}" for n in range(n_workers * n_slots)]
    homes: dict[str, str] = {}
    running: dict[str, Worker] = {}
    for name in [*names, *random.choices(names, k=200)]:
        if name in running:
            running.pop(name).running.remove(name)
        worker = chosen(table, name)
        worker.running.append(name)
        running[name] = worker
        assert homes.setdefault(name, worker.id) == worker.id
        while running and random.random() < 0.5:
            ended = random.choice(sorted(running))
            running.pop(ended).running.remove(ended)
    assert set(Counter(homes.values()).values()) == {n_slots}


def test_the_least_recently_used_prefix_makes_room() -> None:
    table = table_with(2, n_slots=1)
    first, second = chosen(table, "a"), chosen(table, "b")
    assert first is not second
    assert chosen(table, "a") is first
    assert chosen(table, "c") is second
    assert list(second.prefixes) == ["c"]


def test_tried_or_unhealthy_workers_come_last() -> None:
    table = WorkerTable()
    table.replace("tiny", at({"a": "http://h:1", "b": "http://h:2"}))
    a, b = table.workers()
    a.avoid()
    assert table.choose("tiny", None, ()) is b
    assert table.choose("tiny", None, {"b"}) is a
    assert table.choose("tiny", None, {"a", "b"}) is None
    a.running += [None] * 3
    table.replace("tiny", at({"a": "http://h:1", "c": "http://h:3"}))
    assert [len(worker.running) for worker in table.workers()] == [3, 0]
