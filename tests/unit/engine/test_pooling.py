"""Texts of several requests share a decode: their order, and the cost of faults. No model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.pooling import Pooling
from worker.errors import InferenceFailed
from worker.llama.pooled import PooledContext, Vector
from worker.wire.adapters import Applied
from worker.wire.black_box import BlackBox
from worker.wire.messages import Answered, Event, Failed, Started

UNNORMALISED = -1
BAD = 13
"""A text that begins with this token cannot be computed."""


class Fake(PooledContext):
    """Returns the sum and number of a text's tokens and the number of adapters, and records the
    groups."""

    most_texts, most_tokens, token_bytes = 4, 20, 0

    def __init__(self) -> None:
        self.groups: list[list[list[int]]] = []

    def __call__(self, texts: list[list[int]], adapters: Applied = ()) -> list[Vector]:
        assert 1 <= len(texts) <= self.most_texts
        assert len(texts) == 1 or sum(map(len, texts)) <= self.most_tokens
        self.groups.append(texts)
        if any(text[0] == BAD for text in texts):
            raise InferenceFailed("the device cannot compute the texts")
        return [np.array([sum(text), len(text), len(adapters)], "f4") for text in texts]


class Bench:
    def __init__(self) -> None:
        self.compute, self.events = Fake(), list[Event]()
        self.decoded: list[float] = []
        self.inbox: deque[Callable[[], None]] = deque()
        self.pooling = Pooling(
            self.inbox.append,
            self.compute,
            self.events.extend,
            lambda: Started(0, 0),
            BlackBox().in_hand,
            self.decoded.append,
        )

    def take(self, request_id: int, *texts: list[int], n_adapters: int = 0) -> None:
        adapters = tuple((number, 1.0) for number in range(n_adapters))
        self.pooling.take(request_id, list(texts), UNNORMALISED, adapters)

    def turn(self) -> None:
        self.inbox.popleft()()

    def run(self) -> None:
        while self.inbox:
            self.turn()

    def ended(self) -> list[int]:
        return [e.request_id for e in self.events if isinstance(e, Answered | Failed)]


def texts(n_texts: int, n_tokens: int, first: int = 1) -> list[list[int]]:
    return [[first + n, *range(20, 19 + n_tokens)] for n in range(n_texts)]


def test_calls_that_wait_share_a_decode() -> None:
    bench = Bench()
    for request_id in range(1, 6):
        bench.take(request_id, [request_id, 20])
    bench.run()
    assert [len(group) for group in bench.compute.groups] == [4, 1]
    assert sorted(bench.ended()) == [1, 2, 3, 4, 5]


def test_a_short_text_does_not_wait_for_many_long_ones() -> None:
    bench = Bench()
    for request_id in range(1, 25):
        bench.take(request_id, *texts(1, 50))
    for _ in range(26):
        bench.turn()
    bench.take(99, [1])
    before = len(bench.compute.groups)
    while 99 not in bench.ended():
        bench.turn()
    assert len(bench.compute.groups) - before <= 3


def test_a_long_request_moves_on_while_short_ones_come() -> None:
    bench = Bench()
    bench.take(1, *texts(5, 20))
    for request_id in range(2, 40):
        bench.take(request_id, *texts(4, 5))
        bench.turn()
        bench.turn()
        if 1 in bench.ended():
            break
    assert 1 in bench.ended() and request_id < 15


request = st.lists(st.integers(1, 30), min_size=1, max_size=9)


@given(st.lists(st.one_of(request, st.just("turn"), st.integers(0, 20)), max_size=40))
def test_each_request_gets_its_own_vectors_once(steps: list[list[int] | str | int]) -> None:
    """Requests of random texts arrive, are cancelled and are computed, in any order; texts of two
    tokens cannot be computed, which fails only their own request."""
    bench = Bench()
    requests: list[list[list[int]]] = []
    n_adapters: list[int] = []
    cancelled: set[int] = set()
    for step in steps:
        if isinstance(step, list):
            firsts = (BAD if size == 2 else 100 * len(requests) + n for n, size in enumerate(step))
            own = [[first, *[1] * (size - 1)] for first, size in zip(firsts, step, strict=True)]
            requests.append(own)
            bench.take(len(requests), *requests[-1], n_adapters=step[0] % 3)
            n_adapters.append(step[0] % 3)
        elif step == "turn":
            if bench.inbox:
                bench.turn()
        elif isinstance(step, int) and step < len(requests):
            cancelled.add(step + 1)
            bench.pooling.cancel(step + 1)
    bench.run()
    assert sorted(bench.ended()) == list(range(1, len(requests) + 1))
    bad = {number for number, own in enumerate(requests, 1) if any(text[0] == BAD for text in own)}
    for event in bench.events:
        if isinstance(event, Answered):
            own, value = requests[event.request_id - 1], event.value
            assert isinstance(value, list) and event.request_id not in bad
            vectors = [np.frombuffer(data, "f4").tolist() for _, data in value]
            n_own = n_adapters[event.request_id - 1]
            assert vectors == [[sum(text), len(text), n_own] for text in own]
            assert [n for n, _ in value] == [len(text) for text in own]
        elif isinstance(event, Failed):
            assert event.request_id in cancelled | bad


class Counted(list[int]):
    """Counts how often its length is asked for."""

    n_asked = 0

    def __len__(self) -> int:
        type(self).n_asked += 1
        return super().__len__()


def test_a_turn_reads_only_the_texts_that_it_computes() -> None:
    bench = Bench()
    bench.take(1, *map(Counted, texts(400, 5, first=100)))
    bench.turn()
    Counted.n_asked = 0
    bench.run()
    assert bench.ended() == [1] and len(bench.compute.groups) == 100
    assert Counted.n_asked < 20 * 400
