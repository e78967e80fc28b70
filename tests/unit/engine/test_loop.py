"""The loop and its scheduler on the byte model: invariants for any sequence of requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import books
from tests.support.byte_runner import (
    ByteRunner,
    ByteSampler,
    expected_answer,
    make_sequence,
    under,
)
from tests.support.driven import Driven, opened
from worker.engine.cache.disk import Disk
from worker.engine.cache.disk_traffic import DiskTraffic
from worker.engine.limits import Limits
from worker.engine.loop import Loop
from worker.engine.media.span import Span
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation.speculation import Drafter
from worker.errors import Cancelled, InferenceFailed, InferenceTimeout, VramOom
from worker.llama.media import MediaChunk
from worker.wire.adapters import Applied
from worker.wire.messages import (
    DecodeOutcome,
    Event,
    Failed,
    Finished,
    PromptProgress,
    Started,
    Token,
)
from worker.wire.work import InferenceRequest

CONTEXT = 96


class Engine(Driven):
    """A loop on the byte model, with its events by request."""

    def __init__(
        self,
        n_slots: int = 4,
        n_cells: int | None = None,
        *,
        divisions: tuple[int, ...] = (),
        most_back: int = 0,
        folder: Path | None = None,
        drafter: Drafter | None = None,
        **limits: Any,
    ) -> None:
        """`n_cells` are those of one pool, which may be divided into these numbers of parts.
        `folder` is that of the disk tier."""
        super().__init__()
        self.now = 0.0
        self.asked: dict[int, tuple[bytes, InferenceRequest]] = {}
        """Requests whose answers have not been checked yet."""
        if not n_cells or not limits.get("unified"):
            n_cells = n_slots * CONTEXT
        sizes: dict[str, Any] = dict(batch=32, prefill_budget=8, memory_bytes=2000, cell_bytes=2.0)
        pool = Limits(n_slots=n_slots, n_cells=n_cells, **sizes | limits)
        self.recurrent = pool.recurrent
        self.runner = ByteRunner(
            n_slots,
            CONTEXT,
            n_cells,
            pool.batch,
            recurrent=pool.recurrent,
            most_back=most_back,
            window=pool.window,
            unified=pool.unified,
        )
        layouts = [
            replace(pool, n_slots=n, n_cells=n_cells // n * n, unified=False) for n in divisions
        ]
        self.scheduler = Scheduler(*layouts, pool)
        if layouts:
            best = self.scheduler.limits
            self.runner.divide(best.n_cells, best.n_slots, best.unified)
        self.cache = self.scheduler.cache
        disk = None
        if folder is not None:
            binding = ("bytes", ["of one", "of another"])
            disk = opened(Disk(folder, 1 << 20, self.runner.memory_kind, lambda _: binding))
        self.loop = Loop(
            self.runner,
            self.scheduler,
            self.receive,
            lambda: self.now,
            disk=disk,
            drafter=drafter,
        )

    def submit(self, request_id: int, prompt: bytes, **options: Any) -> Sequence:
        sequence = make_sequence(request_id, prompt, **options)
        self.asked[request_id] = prompt, sequence.request
        self.loop.submit(sequence)
        return sequence

    def ask(self, request_id: int, prompt: bytes, n_system: int = 0) -> int:
        """Run a request to its end; returns its number of cached tokens."""
        self.submit(request_id, prompt, max_tokens=8).n_system = n_system
        self.run()
        assert self.have_finished(request_id)
        return self.cached_tokens(request_id)

    def run(self, max_turns: int = 5000) -> None:
        """Run until nothing is left to do."""
        self.turn()
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                return self.check_answers()
            self.turn()
        raise AssertionError(f"not idle after {max_turns} steps")

    def drain(self) -> None:
        """Run until everything is computed, read and written."""
        self.turn()
        traffic = self.loop.traffic
        while self.scheduler.waiting or self.scheduler.running or (traffic and traffic.is_writing):
            self.loop.turn()
        self.check_answers()
        self.check_idle()

    def check(self) -> None:
        books.check(self.cache, self.runner.last_position)
        for slot in self.cache.slots:
            tokens = under(slot.scope.adapters, slot.tokens[: slot.n_cells])
            assert self.runner.tokens_of(slot.index) == tokens
        assert self.cache.cells_running + self.cache.cells_cached == self.runner.n_used

    def check_answers(self) -> None:
        """Check that each request that ended without a stop has its prompt's answer."""
        for request_id in [each for each in self.asked if self.has_ended(each)]:
            prompt, request = self.asked.pop(request_id)
            n_most, length = request.max_tokens, self.runner.context_length
            expected = expected_answer(prompt, n_most, length, request.adapters)
            expected, text = expected[len(request.produced) :], self.text(request_id).encode()
            is_whole = self.have_finished(request_id) and not request.stop
            assert text == expected if is_whole else expected.startswith(text)

    @property
    def traffic(self) -> DiskTraffic:
        assert self.loop.traffic is not None, "it has a folder"
        return self.loop.traffic

    def end(self, request_id: int) -> Finished | Failed:
        last = self.events[request_id][-1]
        assert isinstance(last, Finished | Failed)
        return last

    def check_order(self, request_id: int) -> None:
        """Check that it started once and first, with exactly one terminal event, which is last."""
        events = self.events[request_id]
        started = [i for i, e in enumerate(events) if isinstance(e, Started)]
        ends = [i for i, e in enumerate(events) if isinstance(e, Finished | Failed)]
        assert ends == [len(events) - 1]
        assert started == [0] or (not started and len(events) == 1)

    def computes_nothing_twice(self) -> bool:
        batches = (chunk for batch in self.runner.batches for chunk in batch)
        computed = Counter((r, at) for r, start, n in batches for at in range(start, start + n))
        return max(computed.values()) == 1

    def check_idle(self) -> None:
        """Check that nothing is held except what is kept for reuse."""
        assert not self.loop._sequences
        assert self.stats is not None
        assert self.stats.kv_cells_used == self.stats.kv_cells_cached == self.runner.n_used


def answered_with(n_tokens: int, begin: bytes = b"", n_own: int = 1) -> list[bytes]:
    """Return prompts with this prefix, `n_own` more bytes, and an answer of `n_tokens`."""
    prompts = (begin + bytes([number]) * n_own for number in range(256))
    return [p for p in prompts if len(expected_answer(p, n_tokens, CONTEXT)) == n_tokens]


prompts = st.one_of(
    st.binary(min_size=1, max_size=CONTEXT),
    st.integers(0, 60).map(lambda n: bytes(range(60)) + bytes([n])),
    st.integers(33, 90).map(lambda n: bytes(i % 7 for i in range(n))),
)
jobs = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 40),  # max_tokens
        st.integers(0, 12),  # steps until the next arrival
        st.sampled_from([None, None, "a", "b"]),  # cache_salt
        st.sampled_from([None, None, None, 0, 3, 9]),  # cancelled after this many steps
        st.booleans(),  # deterministic
        st.sampled_from([(), (), ((0, 1.0),), ((0, 0.5), (1, 1.0))]),  # adapters
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    jobs,
    st.integers(1, 4),
    st.integers(CONTEXT + 1, 4 * CONTEXT),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 12, 40]),
    st.booleans(),
    st.lists(st.sampled_from(["ok", "no_room", "aborted"]), max_size=30),
)
def test_every_request_ends_once_with_its_own_text_and_leaves_nothing(
    jobs: list[tuple[bytes, int, int, str | None, int | None, bool, Applied]],
    n_slots: int,
    n_cells: int,
    prefix_cache: bool,
    recurrent: bool,
    window: int,
    unified: bool,
    outcomes: list[DecodeOutcome],
) -> None:
    engine = Engine(
        n_slots,
        n_cells,
        prefix_cache=prefix_cache,
        recurrent=recurrent,
        window=window,
        unified=unified,
    )
    engine.runner.outcomes = [o for o in outcomes if not (recurrent and o == "aborted")]
    cancels: list[tuple[int, int]] = []
    for request_id, (prompt, max_tokens, pause, salt, cancel, alone, applied) in enumerate(jobs):
        engine.submit(
            request_id,
            prompt,
            max_tokens=max_tokens,
            cache_salt=salt,
            deterministic=alone,
            adapters=applied,
        )
        if cancel is not None:
            cancels.append((cancel, request_id))
        for _ in range(pause):
            engine.turn()
        for left, cancelled in list(cancels):
            if left <= pause:
                engine.loop.cancel(cancelled)
    engine.run()
    for request_id, (prompt, max_tokens, *_rest, applied) in enumerate(jobs):
        engine.check_order(request_id)
        expected = expected_answer(prompt, max_tokens, CONTEXT, applied).decode()
        end = engine.end(request_id)
        if isinstance(end, Finished):
            assert engine.text(request_id) == expected
            assert end.tokens_out == len(expected) + (end.stop_reason == "EOS")
        elif isinstance(end.error, Cancelled):
            assert expected.startswith(engine.text(request_id))
        else:
            # Only a request that does not fit even when it is alone.
            assert isinstance(end.error, VramOom)
            assert "no_room" in outcomes
    engine.check_idle()


def test_decoding_continues_while_a_long_prompt_is_computed() -> None:
    engine = Engine(prefill_budget=4)
    engine.submit(1, b"abc", max_tokens=60)
    engine.turn()
    engine.submit(2, bytes(90), max_tokens=4)
    engine.run()
    steps = [batch for batch in engine.runner.batches if any(r == 2 for r, _, _ in batch)]
    prompt_steps = [batch for batch in steps if any(r == 2 and n > 1 for r, _, n in batch)]
    n_first = len(engine.text(1))
    assert n_first >= len(prompt_steps) - 1, "one token of the running stream a step"
    for batch in prompt_steps[: n_first - 1]:
        assert (1, 1) in [(r, n) for r, _, n in batch]
        assert sum(n for r, _, n in batch if r == 2) <= 4
    progress = [each.n_computed for each in engine.events[2] if isinstance(each, PromptProgress)]
    assert progress == sorted(progress) and len(progress) > 2
    assert progress[-1] < 90, "each step but the last"
    assert not any(isinstance(each, PromptProgress) for each in engine.events[1])


def test_a_request_has_started_before_its_first_step_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of a long prompt takes a second, in which it does not wait for a slot."""
    engine = Engine()
    compute, kinds = engine.runner.decode, list[list[type[Event]]]()

    def decode() -> DecodeOutcome:
        kinds.append([type(each) for each in engine.events[1]])
        return compute()

    monkeypatch.setattr(engine.runner, "decode", decode)
    engine.submit(1, answered_with(4)[0], max_tokens=4)
    engine.turn()
    assert kinds == [[Started]]


@pytest.mark.parametrize("reports_progress", [True, False])
@pytest.mark.parametrize("n_turns", [14, 30])
def test_the_progress_of_a_prompt_that_starts_over_only_grows(
    n_turns: int, reports_progress: bool
) -> None:
    """And no progress is reported once the answer has begun."""
    engine = Engine(prefill_budget=4, prefix_cache=False, memory_bytes=0)
    first, second, *_ = answered_with(50, n_own=40)
    engine.submit(1, first, max_tokens=50)
    engine.turn()
    engine.submit(2, second, max_tokens=50, reports_progress=reports_progress)
    for _ in range(n_turns):
        engine.turn()
    assert engine.scheduler.preempt_youngest() is not None
    engine.run()
    computed = [(s, n) for b in engine.runner.batches for r, s, n in b if r == 2]
    assert len([start for start, _ in computed if not start]) == 2, "it did start over"
    progress = [each.n_computed for each in engine.events[2] if isinstance(each, PromptProgress)]
    assert len(progress) >= 9 and progress == sorted({*progress})
    kinds = [type(each) for each in engine.events[2]]
    assert PromptProgress not in kinds[kinds.index(Token) :]


@pytest.mark.parametrize("kind", [{}, {"recurrent": True}, {"window": 8}])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_computes_nothing_twice(
    kind: dict[str, Any], prefix_cache: bool
) -> None:
    engine = Engine(n_slots=2, n_cells=100, unified=True, prefix_cache=prefix_cache, **kind)
    for request_id, prompt in enumerate(answered_with(40, n_own=40)[:2], 1):  # more than 100 cells
        engine.submit(request_id, prompt, max_tokens=40)
    n_preempted = 0
    engine.turn()
    while engine.scheduler.has_work:
        engine.turn()
        preempted = [s.request_id for s in engine.scheduler.waiting if s.n_out]
        assert list(engine.loop.stats().preempted) == preempted
        n_preempted += len(preempted)
    assert n_preempted
    assert engine.computes_nothing_twice()
    engine.check_answers()
    engine.check_order(1)
    engine.check_order(2)


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_failing_batch_fails_the_youngest_request_alone(recurrent: bool) -> None:
    engine = Engine(recurrent=recurrent)
    engine.submit(1, b"first", max_tokens=6)
    engine.turn()
    engine.submit(2, b"second", max_tokens=6)
    engine.runner.outcomes = ["failed"]
    engine.run()
    failed = engine.end(2)
    assert isinstance(failed, Failed) and isinstance(failed.error, VramOom)
    assert isinstance(engine.end(1), Finished)
    engine.check_idle()


@pytest.mark.parametrize("fault", ["aborted", "failed", "no picture"])
@pytest.mark.parametrize(
    ("n_slots", "unified", "divisions"),
    [(1, True, ()), (2, False, ()), (2, True, ()), (2, True, (2,))],
)
def test_requests_after_a_first_batch_that_failed_are_served(
    n_slots: int, unified: bool, divisions: tuple[int, ...], fault: Any
) -> None:
    """A copy for a request that is cancelled in its first batch blocks nothing, whether it is from
    another slot or from memory."""

    def fails(span: Span, salt: str | None) -> bool:
        raise InferenceFailed("the projector fails")

    engine = Engine(n_slots=n_slots, unified=unified, memory_bytes=2000, divisions=divisions)
    engine.scheduler.pace.seconds_per_prompt_token = 1.0
    begun, other = bytes(range(40, 130)), bytes(range(130, 170))
    engine.submit(1, begun, max_tokens=2)
    engine.run()
    if n_slots == 1:  # what was begun goes to memory
        engine.submit(2, other, max_tokens=2)
        engine.run()
    engine.submit(3, begun[:40] + b"another end", max_tokens=4)
    if fault == "no picture":
        engine.loop._run_inbox()
        (sequence,) = engine.scheduler.waiting
        sequence.spans = (Span(40, MediaChunk(5, False, 5, None), b"key"),)
        engine.runner.encode = fails  # type: ignore[method-assign]
    else:
        engine.runner.outcomes = [fault]
    engine.turn()
    assert engine.cache.is_settled == (fault != "no picture"), "only a batch settles a copy"
    engine.loop.cancel(3)
    prompts = {4: begun[:40] + b"one more", 5: b"from nothing", 6: b"long " * (CONTEXT // 6)}
    for request_id, prompt in prompts.items():
        engine.submit(request_id, prompt, max_tokens=4)
    engine.run()
    assert isinstance(engine.end(3), Failed)
    assert engine.have_finished(*prompts)
    engine.check_idle()


def test_a_samplers_own_error_fails_its_request_alone() -> None:
    class Broken(ByteSampler):
        def take_given(self, most: int) -> list[int]:
            raise OverflowError("math range error")

    engine = Engine()
    engine.submit(1, b"first", max_tokens=6)
    sequence = make_sequence(2, b"second", max_tokens=6)
    sequence.sampler = Broken(3)
    engine.loop.submit(sequence)
    engine.run()
    failed = engine.end(2)
    assert isinstance(failed, Failed) and isinstance(failed.error, InferenceFailed)
    assert isinstance(engine.end(1), Finished)
    engine.check_idle()


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits() -> None:
    engine = Engine(n_slots=1)
    engine.submit(1, b"running", max_tokens=60, deadline=5.0)
    engine.submit(2, b"waiting", max_tokens=60, deadline=5.0)
    engine.turn()
    engine.now = 5.0
    engine.run()
    for request_id in (1, 2):
        end = engine.end(request_id)
        assert isinstance(end, Failed) and isinstance(end.error, InferenceTimeout)
    assert all(r == 1 for batch in engine.runner.batches for r, _, _ in batch)


def test_a_stop_ends_the_stream_and_is_not_sent() -> None:
    engine = Engine()
    prompt = b"a prompt"
    answer = expected_answer(prompt, 20, CONTEXT).decode()
    stop = answer[5:8]
    engine.submit(1, prompt, max_tokens=20, stop=("#", stop))
    engine.run()
    assert isinstance(end := engine.end(1), Finished)
    assert (end.stop_reason, end.stop_sequence) == ("STOP_SEQUENCE", stop)
    assert engine.text(1) == answer[: answer.index(stop)]


def test_another_engine_finds_the_same_stops() -> None:
    """Stops that begin before `min_tokens` do not count."""
    prompt = b"a prompt"
    answer = expected_answer(prompt, 12, CONTEXT)
    assert len(answer) == 12
    for n_said in (5, 6, 7):
        engine = Engine()
        produced, stop = tuple(answer[:n_said]), (answer[4:8].decode(),)
        engine.submit(1, prompt, max_tokens=12, stop=stop, min_tokens=6, produced=produced)
        engine.run()
        assert engine.text(1).encode() == answer[n_said:]
