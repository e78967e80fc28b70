"""Which worker a prompt goes to."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.fleet.affinity import bound, key_of, ranked
from worker.fleet.table import Table

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


def test_a_conversation_keeps_its_key_while_it_goes_on() -> None:
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


def test_the_bound_sends_what_is_too_much_to_the_next() -> None:
    table = Table()
    table.replace("tiny", {f"w{n}": f"http://127.0.0.1:{n}" for n in range(3)})
    for n in range(1, 31):
        worker = table.choose("tiny", "the same prompt", ())
        assert worker is not None
        worker.n_running += 1
        loads = [each.n_running for each in table.workers()]
        assert max(loads) <= bound(n, 3)
    assert max(loads) <= 2 * sum(loads) / len(loads)


def test_whoever_was_tried_or_is_not_well_comes_last() -> None:
    table = Table()
    table.replace("tiny", {"a": "http://h:1", "b": "http://h:2"})
    a, b = table.workers()
    a.rest()
    assert table.choose("tiny", None, ()) is b
    assert table.choose("tiny", None, {"b"}) is a
    assert table.choose("tiny", None, {"a", "b"}) is None
    a.n_running = 3
    table.replace("tiny", {"a": "http://h:1", "c": "http://h:3"})
    assert [worker.n_running for worker in table.workers()] == [3, 0]
