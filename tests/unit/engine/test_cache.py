"""The cache's bookkeeping alone, without a runner: its choices, compared with the rule applied to
all candidates."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.byte_runner import ByteSampler
from worker.engine.cache import cache as books
from worker.engine.cache.cache import MIN_SHARED_TOKENS, Cache, Match, Price
from worker.engine.cache.memory import Memory
from worker.engine.cache.moves import Copy, Divide, Restore, Save, Snapshot, State, Truncate
from worker.engine.cache.slots import Slot, share
from worker.engine.limits import Limits
from worker.engine.media.span import Span
from worker.engine.pace import Pace
from worker.engine.sequence import Awaited, Sequence
from worker.llama.memory_kind import MemoryKind
from worker.wire.adapters import Scope
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest

KINDS: list[dict[str, Any]] = [{}, {"recurrent": True}, {"window": 8}]
_ids = count()


def limits_of(n_slots: int = 4, **more: Any) -> Limits:
    numbers: dict[str, Any] = dict(n_cells=1000, batch=512, prefill_budget=512)
    numbers |= {"memory_bytes": 10_000, "cell_bytes": 2.0} | more
    return Limits(n_slots=n_slots, **numbers)


def cache_of(n_slots: int = 4, **more: Any) -> Cache:
    return Cache(limits_of(n_slots, **more), Pace(1.0, 512))


def asking(tokens: list[int], salt: str | None = None, **request: Any) -> Sequence:
    request_id = next(_ids)
    sampling = Sampling(seed=0, temperature=0.0)
    work = InferenceRequest(
        job_id=str(request_id),
        prompt=tuple(tokens),
        sampling=sampling,
        max_tokens=100,
        cache_salt=salt,
        **request,
    )
    return Sequence(request_id, work, list(tokens), ByteSampler(), n_most=10_000)


def begin(cache: Cache, sequence: Sequence, *, n_computed: int | None = None) -> Slot:
    """Give a sequence a slot, and compute its tokens."""
    assert cache.acquire(sequence, cache.match(sequence))
    assert sequence.slot is not None
    slot = cache.slots[sequence.slot]
    sequence.n_computed = len(sequence.tokens) if n_computed is None else n_computed
    cache.take_moves()
    cache.settled()
    return slot


def keep(cache: Cache, tokens: list[int], salt: str | None = None) -> Slot:
    """Make a slot that keeps these tokens after their request has ended."""
    sequence = asking(tokens, salt)
    slot = begin(cache, sequence)
    cache.release(sequence, keep=True)
    return slot


def put(cache: Cache, index: int, tokens: list[int], last_used: int = 0) -> Slot:
    """The same, in this slot."""
    slot = cache.slots[index]
    slot.kept, slot.last_used = list(tokens), last_used
    return slot


def run_in(cache: Cache, index: int, tokens: list[int], n_computed: int | None = None) -> Sequence:
    """Make a sequence that runs in this slot."""
    sequence = asking(tokens)
    sequence.slot, cache.slots[index].owner = index, sequence
    sequence.n_computed = len(tokens) if n_computed is None else n_computed
    return sequence


def state_of(tokens: list[int], n_bytes: int = 100, **more: Any) -> State:
    return State(tokens, Scope(), n_bytes, memoryview(bytes(1)), **more)


def some(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


# --- which prefix a prompt continues from --------------------------------------------------------


def test_the_last_token_is_always_computed_and_short_beginnings_are_not_reused() -> None:
    for n in (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS + 1):
        cache = cache_of()
        slot = keep(cache, some(n))
        match = cache.match(asking(some(n)))
        assert match.source is (slot if n > MIN_SHARED_TOKENS else None)
        assert match.n_ready == (n - 1 if n > MIN_SHARED_TOKENS else 0)
        longer = cache.match(asking(some(n + 5)))
        assert (longer.source, longer.n_ready, longer.n_common) == (slot, n, n)
    differs = some(MIN_SHARED_TOKENS - 1) + [999] * 20
    assert cache.match(asking(differs)) == Match()


def test_a_prompt_finds_only_its_tenant_s_cells_and_those_that_may_be_reused() -> None:
    cache = cache_of()
    slot = keep(cache, some(50), "one")
    assert cache.match(asking(some(60), "one")).source is slot
    assert cache.match(asking(some(60))).source is None
    assert cache.match(asking(some(60), "one", deterministic=True)).source is None
    alone = asking(some(50, 200), deterministic=True)
    begin(cache, alone)
    assert cache.match(asking(some(60, 200))) == Match(), "its batches are its own"
    assert cache_of(prefix_cache=False).match(asking(some(60))) == Match()


@given(
    per_token=st.sampled_from([0.0, 0.5, 1.0]),
    per_byte=st.sampled_from([0.001, 0.1, 1.0]),
    copy_seconds=st.sampled_from([0.0, 5.0, 40.0]),
    n_running=st.integers(MIN_SHARED_TOKENS, 80),
    n_idle=st.integers(MIN_SHARED_TOKENS, 80),
    n_more=st.integers(0, 80),
    n_state=st.integers(MIN_SHARED_TOKENS, 80),
    n_locks=st.integers(0, 1),
)
def test_a_prompt_continues_from_the_source_that_saves_the_most_time(
    per_token: float,
    per_byte: float,
    copy_seconds: float,
    n_running: int,
    n_idle: int,
    n_more: int,
    n_state: int,
    n_locks: int,
) -> None:
    """A copy between cells takes time, one from memory takes the time of its bytes; taking over a
    slot is free, if at least half of its cells are used. Copying a locked state is not counted."""
    cache = cache_of(copy_seconds=copy_seconds)
    cache.pace.seconds_per_prompt_token, cache.copying.per_byte = per_token, per_byte
    run_in(cache, 0, some(n_running) + [900, 901])
    put(cache, 1, some(n_idle) + [800] * n_more)
    state = state_of(some(n_state), n_locks=n_locks)
    cache.memory.states.append(state)

    copied = copy_seconds / per_token if per_token else 0.0
    read = 100 * per_byte / per_token if per_token else MIN_SHARED_TOKENS
    saved: dict[int, float] = {
        id(cache.slots[0]): n_running - copied,
        id(cache.slots[1]): n_idle - (copied if n_idle < n_more else 0),
        id(state): n_state - (0 if n_locks else read),
    }
    match = cache.match(asking(some(90)))
    most = max(saved.values())
    if most <= 0:
        assert match.source is None and match.n_ready == 0
    else:
        assert saved[id(match.source)] == pytest.approx(most)
    assert match.n_common == max(n_running, n_idle, n_state)


def test_a_state_that_saves_no_time_is_not_restored() -> None:
    for per_byte, brings in ((0.5, False), (0.49, True)):
        cache = cache_of()
        cache.pace.seconds_per_prompt_token, cache.copying.per_byte = 1.0, per_byte
        cache.memory.states.append(state_of(some(50)))
        assert (cache.match(asking(some(60))).source is not None) == brings


def test_a_state_is_restored_only_if_all_of_it_fits() -> None:
    for n_state, n_asked, brings in ((250, 100, True), (251, 100, False), (300, 310, True)):
        cache = cache_of(n_cells=1000)  # a prompt of 310 would get longer parts
        cache.memory.states.append(state_of(some(n_state)))
        assert (cache.match(asking(some(n_asked))).source is not None) == brings


def test_a_prompt_waits_for_the_longest_of_several() -> None:
    cache = cache_of()
    for index, n_tokens in enumerate((50, 80, 60)):
        run_in(cache, index, some(n_tokens) + [900 + index], 40)
    assert cache.match(asking(some(90))).awaited == Awaited(cache.slots[1].owner or asking([]), 80)


@given(st.integers(0, 60), st.integers(30, 60), st.integers(40, 70))
def test_a_prompt_waits_for_a_longer_prefix(n_computed: int, n_kept: int, n_asked: int) -> None:
    """A running sequence will have a longer prefix than there is now, which is worth waiting for
    from eight more tokens on."""
    cache = cache_of()
    assume(n_computed < 60)
    owner = run_in(cache, 0, some(60), n_computed)
    put(cache, 1, some(n_kept))
    n_there = min(max(n_computed, n_kept), n_asked - 1)
    n_coming = min(60, n_asked - 1)
    if n_there < MIN_SHARED_TOKENS:
        n_there = 0
    awaited = cache.match(asking(some(n_asked))).awaited
    if n_coming > n_computed and n_coming - n_there >= 8:
        assert awaited == Awaited(owner, n_coming) and awaited.is_due
    else:
        assert awaited is None
    cache.limits = Limits(1, 1, 1, 1, 1, recurrent=True)
    assert cache.match(asking(some(n_asked))).awaited is None, "nobody could cut it there"


@given(st.lists(st.integers(1, 90), unique=True), st.integers(33, 90), st.sampled_from(KINDS[1:]))
def test_memory_that_cannot_be_cut_continues_from_its_longest_snapshot(
    lengths: list[int], n_common: int, kind: dict[str, Any]
) -> None:
    cache = cache_of(**kind)
    slot = put(cache, 0, some(90))
    slot.first = 90 - 8 if kind.get("window") else 0
    slot.snapshots = [Snapshot(length, b"") for length in lengths]
    match = cache.match(asking(some(n_common) + [999] * 5))
    usable = [each for each in lengths if MIN_SHARED_TOKENS <= each <= n_common]
    # A window that was not overwritten after the cut needs no snapshot.
    if n_common == 90:
        assert (match.n_ready, match.snapshot) == (90, None)
    elif usable:
        assert match.snapshot is not None
        assert match.n_ready == match.snapshot.length == max(usable)
    else:
        assert match.source is None and match.n_common == n_common
    cache = cache_of(**kind)
    state = state_of(some(90), n_bytes=0, snapshots=slot.snapshots)
    cache.memory.states.append(state)
    cache.pace.seconds_per_prompt_token = 1.0
    match = cache.match(asking(some(n_common) + [999] * 5))
    usable = [each for each in lengths if each <= n_common]
    if n_common == 90:
        assert (match.source, match.n_ready) == (state, 90)
    else:
        assert match.n_ready == max(usable, default=0)
        assert (match.snapshot is None) == (not usable)


@given(st.integers(-1, 90), st.integers(0, 90))
def test_a_window_is_cut_where_all_of_its_cells_are_there(first: int, length: int) -> None:
    cache = cache_of(window=8)
    slot = put(cache, 0, some(90))
    slot.first = first
    needed = range(max(length - 8, 0), length)
    has_all = first >= 0 and first <= needed.start
    assert cache.limits.can_cut(length, slot.n_cells, slot.first) == has_all


# --- whether there is room -------------------------------------------------------------------


@given(
    n_running=st.integers(40, 80),
    n_computed=st.integers(40, 80),
    n_asked=st.integers(40, 100),
    source=st.sampled_from(["none", "running", "held", "idle", "state"]),
    n_ready=st.integers(33, 39),
    n_held=st.integers(1, 39),
    n_state=st.integers(40, 120),
)
def test_a_sequence_fits_if_its_own_cells_do(
    n_running: int,
    n_computed: int,
    n_asked: int,
    source: str,
    n_ready: int,
    n_held: int,
    n_state: int,
) -> None:
    """In addition to the cells of running sequences; cells shared with one of them exist, and those
    of idle slots are evicted. It needs one more cell, for the sampled token."""

    def fits(n_cells: int) -> bool:
        cache = cache_of(unified=True, n_cells=n_cells)
        run_in(cache, 0, some(n_running), min(n_computed, n_running))
        run_in(cache, 2, some(7, 500))
        idle = put(cache, 1, some(n_ready))
        if source == "held":
            share(cache.slots[0], idle, n_held, cache.slots)
        matches = {
            "running": Match(cache.slots[0], n_ready),
            "held": Match(idle, n_ready),
            "idle": Match(idle, n_ready),
            "state": Match(state_of(some(n_state)), n_ready),
        }
        return cache.fits(asking(some(n_asked)), matches.get(source, Match()))

    n_needed = n_asked + 1
    if source == "running":
        n_needed -= n_ready
    elif source == "held":  # the idle slot shares its first cells with the running one
        n_needed -= min(n_held, n_ready)
    elif source == "state":  # which is restored completely
        n_needed = max(n_needed, n_state)
    n_cells = n_running + 7 + n_needed
    assert fits(n_cells) and not fits(n_cells - 1)
    assert cache_of(n_cells=1).fits(asking(some(n_asked)), Match()), "each slot has its own part"


def test_cells_are_freed_from_the_oldest_on_until_there_are_enough() -> None:
    cache = cache_of(unified=True, n_cells=200)
    for index, last_used in enumerate([3, 1, 2]):
        put(cache, index, some(50, 100 * index), last_used)
    cache._make_cells(50)
    assert cache.cells_cached == 150 and not cache.moves, "they fit"
    cache._make_cells(51)
    assert [bool(slot.kept) for slot in cache.slots[:3]] == [True, False, True]
    cache._make_cells(1000)
    assert cache.cells_cached == 0
    assert not cache.room(), "nothing is left"
    split = cache_of(n_cells=1)
    put(split, 0, some(50))
    split._make_cells(1000)
    assert split.slots[0].kept


@given(
    st.lists(st.integers(0, 3), min_size=4, max_size=4, unique=True),
    st.lists(st.sampled_from([0, 20, 40]), min_size=4, max_size=4),
    st.integers(0, 90),
)
def test_idle_cells_are_moved_out_once_they_are_the_most(
    ages: list[int], sizes: list[int], n_running: int
) -> None:
    cache = cache_of(5, unified=True)
    if n_running:
        run_in(cache, 4, some(n_running, 500))
    for index, (age, size) in enumerate(zip(ages, sizes, strict=True)):
        put(cache, index, some(size, 100 * index), age)
    source = cache.slots[0]
    cache.clear(Match(source, 0))
    clears = sum(sizes) > n_running
    for slot, size in zip(cache.slots[1:4], sizes[1:], strict=True):
        assert len(slot.kept) == (0 if clears else size)
    assert len(source.kept) == sizes[0], "the request goes on from it"
    saved = [each.tokens for each in cache.memory.states]
    assert sorted(map(len, saved)) == [n for n in sizes[1:] if n >= MIN_SHARED_TOKENS] * clears
    newest = sorted(range(1, 4), key=lambda index: -ages[index])
    expected = [some(sizes[i], 100 * i) for i in newest if sizes[i] >= MIN_SHARED_TOKENS]
    assert saved == expected * clears, "the newest first, while there is time"


def test_cells_that_cannot_be_saved_stay() -> None:
    cache = cache_of(unified=True, memory_bytes=0)
    slot = put(cache, 0, some(50))
    cache.clear(Match())
    assert slot.kept and not cache.moves
    split = cache_of()
    slot = put(split, 0, some(50))
    split.clear(Match())
    assert slot.kept


# --- slots -----------------------------------------------------------------------------------


def n_runs(used: set[int]) -> int:
    return sum(index - 1 not in used for index in used)


slots_of_six = st.lists(
    st.tuples(st.sampled_from(["running", "kept", "empty"]), st.integers(0, 9)),
    min_size=6,
    max_size=6,
)


@given(slots_of_six, st.booleans())
def test_a_new_sequence_takes_the_slot_that_costs_the_least(
    slots: list[tuple[str, int]], unified: bool
) -> None:
    """In a split pool the one that makes the fewest gaps, then an empty one, then the least
    recently used."""
    cache = cache_of(6, unified=unified)
    used = set()
    for index, (what, last_used) in enumerate(slots):
        if what == "running":
            used.add(index)
            run_in(cache, index, some(40, 100 * index))
        put_tokens = some(40, 100 * index) if what == "kept" else []
        cache.slots[index].kept, cache.slots[index].last_used = put_tokens, last_used

    def cost(index: int) -> tuple[int, bool, int]:
        what, last_used = slots[index]
        return 0 if unified else n_runs(used | {index}), what == "kept", last_used

    idle = [index for index in range(6) if index not in used]
    sequence = asking(some(5, 7000))
    assert cache.acquire(sequence, Match()) == bool(idle)
    if idle:
        assert sequence.slot is not None
        assert cost(sequence.slot) == min(map(cost, idle))
        slot = cache.slots[sequence.slot]
        assert slot.owner is sequence and not slot.kept
        assert slot.last_used == cache.now and not slot.is_new


@given(slots_of_six, st.lists(st.integers(0, 30), min_size=6, max_size=6), st.integers(0, 40))
def test_a_hole_is_closed_by_the_best_move_that_is_worth_it(
    slots: list[tuple[str, int]], produced: list[int], n_left: int
) -> None:
    cache = cache_of(6, copy_seconds=1.0)
    used, movable = set(), []
    for index, (what, last_used) in enumerate(slots):
        if what == "running":
            used.add(index)
            stream = run_in(cache, index, some(40, 100 * index))
            stream.n_prompt = 40 - produced[index]
            stream.n_most = 40 + n_left
            # It is expected to continue for its current length plus 16 tokens.
            if produced[index] and min(n_left, produced[index] + 16) * 0.05 > 1.0:
                movable.append(index)
        else:
            cache.slots[index].kept = some(40, 100 * index) if what == "kept" else []
            cache.slots[index].last_used = last_used
    free = [index for index in range(6) if index not in used]
    changes = {
        (a, b): (n_runs((used - {a}) | {b}) - n_runs(used), slots[b][0] == "kept", slots[b][1])
        for a in movable
        for b in free
    }
    best = min(changes.values(), default=(0, False, 0))
    owners = {index: cache.slots[index].owner for index in used}
    moved = cache.close_hole(0.05)
    assert moved == (best[0] < 0)
    copies = [move for move in cache.moves if isinstance(move, Copy)]
    assert len(copies) == moved
    for copy in copies:
        stream = owners[copy.source]  # type: ignore[assignment]
        assert changes[copy.source, copy.slot] == best and copy.length == 40
        assert stream.slot == copy.slot and cache.slots[copy.slot].owner is stream
        assert cache.slots[copy.source].owner is None and not cache.slots[copy.source].kept
        assert cache.slots[copy.slot].last_used == cache.now


@pytest.mark.parametrize(("per_byte", "saves"), [(1e-9, True), (0.01, False)])
def test_a_stream_that_moves_pushes_out_what_its_new_slot_keeps(
    per_byte: float, saves: bool
) -> None:
    cache = cache_of(3)
    cache.copying.per_byte = per_byte  # the second takes 0.8 s, for which streams wait
    first, last = run_in(cache, 0, some(40)), run_in(cache, 2, some(40, 100))
    for stream in (first, last):
        stream.n_most = 1000
    first.n_prompt, cache.slots[0].scope = 30, Scope("tenant")
    put(cache, 1, some(40, 200))
    assert cache.close_hole(1.0)
    state = next(iter(cache.memory.states), None)
    saved = [Save(1, state)] if state is not None else []
    assert cache.moves == [*saved, Truncate(1, 0), Copy(0, 1, 40), Truncate(0, 0)]
    assert bool(saved) == saves
    assert first.slot == 1 and cache.slots[1].owner is first
    assert cache.slots[1].scope == Scope("tenant")
    assert cache.slots[1].last_used == cache.now
    # The copy is made with the next batch: until then, nothing writes where it reads, or reads
    # where it writes to.
    assert not cache.acquire(asking(some(5)), Match())
    assert not cache.close_hole(1.0)
    cache.preempt(first)
    assert first.saved is None
    cache.settled()
    assert cache.acquire(asking(some(5)), Match())


def test_prompts_and_deterministic_requests_are_not_moved() -> None:
    for n_prompt, deterministic in ((40, False), (30, True)):
        cache = cache_of(3)
        run_in(cache, 2, some(40, 100))
        sequence = asking(some(40), deterministic=deterministic)
        sequence.slot, cache.slots[0].owner = 0, sequence
        sequence.n_computed, sequence.n_prompt, sequence.n_most = 40, n_prompt, 1000
        assert not cache.close_hole(1.0)


def test_a_slot_is_taken_over_if_half_of_it_is_reused() -> None:
    """Its lost cells go to memory, if they are long enough to be reused."""
    cases = ((80, 40, True), (81, 40, False), (71, 40, True), (40, 40, True))
    for n_kept, n_ready, takes_over in cases:
        cache = cache_of()
        slot = put(cache, 2, some(n_kept))
        sequence = asking(some(n_ready) + [999] * 3)
        assert cache.acquire(sequence, Match(slot, n_ready))
        if not takes_over:
            assert sequence.slot != 2 and slot.kept
            assert cache.moves == [Copy(2, sequence.slot or 0, n_ready)]
        else:
            assert sequence.slot == 2
            saved = [Save(2, state) for state in cache.memory.states]
            assert len(saved) == (n_kept - n_ready >= MIN_SHARED_TOKENS)
            cut = [Truncate(2, n_ready)] if n_ready < n_kept else []
            assert cache.moves == saved + cut
        assert sequence.n_computed == n_ready
    only = cache_of(1)
    slot = put(only, 0, some(81))
    assert only.acquire(asking(some(41)), Match(slot, 40)), "there is no other"


def test_slots_of_a_move_are_left_alone_until_a_batch_was_computed() -> None:
    """A copy is made with the next batch, but a state is written at once."""
    cache = cache_of(3)
    source, state = put(cache, 0, some(100)), state_of(some(50, 500))
    first = asking(some(40))
    assert cache.acquire(first, Match(source, 40))
    assert first.slot is not None and first.slot != 0
    copied = cache.slots[first.slot]
    assert not cache.acquire(asking(some(39)), Match(copied, 38)), "not there yet"
    assert cache.save(put(cache, copied.index, some(40))) is None
    copied.kept = []
    # The source of the copy will be read, so no state may overwrite it.
    other = asking(some(60, 500))
    assert cache.acquire(other, Match(state, 50))
    assert other.slot == 3 - first.slot
    late = asking(some(60, 500))
    assert not cache.acquire(late, Match(state, 50))
    assert late.slot is None and source.kept
    cache.settled()
    assert cache.acquire(late, Match(state, 50)) and late.slot == 0


def test_a_slot_that_is_cut_to_a_snapshot_is_saved_first() -> None:
    cache = cache_of(2, recurrent=True)
    slot = put(cache, 0, some(100))
    snapshot = Snapshot(60, b"x")
    assert cache.acquire(asking(some(61)), Match(slot, 60, snapshot))
    (state,) = cache.memory.states
    assert cache.moves == [Save(0, state), Truncate(0, 60, snapshot)]
    assert snapshot.last_used and slot.last_used > snapshot.last_used
    assert not cache.acquire(asking(some(61)), Match(slot, 60, snapshot))


def test_one_step_restores_no_more_states_than_streams_can_wait_for() -> None:
    cache = cache_of(4)
    cache.copying.per_byte = 0.0006  # 0.06 s each
    put(cache, 0, some(1000, 900))
    cache.room()
    states = [state_of(some(50, 100 * number)) for number in range(3)]
    acquired = [cache.acquire(asking([1]), Match(each, 50)) for each in states]
    assert acquired == [True, False, False], "nobody waits for the first"
    cache.take_moves()
    acquired = [cache.acquire(asking([1]), Match(each, 50)) for each in states[1:]]
    assert acquired == [True, False], "one is always brought back in a step"


def test_a_slot_has_the_snapshots_of_its_cells() -> None:
    cache = cache_of(recurrent=True)
    slot = put(cache, 0, some(100))
    slot.snapshots = [Snapshot(length, b"x") for length in (20, 60, 61)]
    sequence = asking(some(61))
    assert cache.acquire(sequence, Match(slot, 60, slot.snapshots[1]))
    assert [each.length for each in cache.slots[sequence.slot or 0].snapshots] == [20, 60]


@pytest.mark.parametrize("kept", [True, False])
def test_a_released_slot_keeps_its_computed_cells_or_nothing(kept: bool) -> None:
    cache = cache_of()
    sequence = asking(some(50), "tenant")
    slot = begin(cache, sequence, n_computed=45)
    slot.snapshots = [Snapshot(40, b"x")]
    before = cache.now
    assert (cache.cells_running, cache.cells_cached, cache.n_idle) == (45, 0, 3)
    cache.release(sequence, keep=kept)
    assert slot.owner is None and sequence.slot is None and cache.n_idle == 4
    assert slot.kept == (some(45) if kept else []) and slot.is_new == kept
    assert bool(slot.snapshots) == kept
    assert (slot.last_used > before) == kept
    assert (cache.cells_running, cache.cells_cached) == (0, 45 if kept else 0)
    assert cache.moves == ([] if kept else [Truncate(slot.index, 0)])


@pytest.mark.parametrize("n_computed", [0, 1, 45])
def test_the_cells_of_a_preempted_sequence_go_to_memory_and_stay(n_computed: int) -> None:
    cache = cache_of(memory_bytes=200)
    sequence = asking(some(50))
    slot = begin(cache, sequence, n_computed=n_computed)
    cache.copying.per_byte = 1e6  # a copy is still faster than computing it again
    before = cache.now
    cache.preempt(sequence)
    assert sequence.slot is None and slot.owner is None
    assert not slot.kept and sequence.n_computed == 0
    if not n_computed:
        assert sequence.saved is None
        return
    state = sequence.saved
    assert state is not None and state.tokens == some(n_computed) and state.n_locks == 1
    assert state.last_used > before
    assert cache.moves == [Save(slot.index, state), Truncate(slot.index, 0)]
    assert cache.memory.locked_bytes == state.n_bytes == 2 * n_computed
    cache.take_moves()
    cache.settled()
    match = cache.match(sequence)
    assert (match.source, match.n_ready) == (state, n_computed)
    assert cache.acquire(sequence, match)
    assert any(isinstance(move, Restore) and move.state is state for move in cache.moves)
    assert sequence.saved is None and state.n_locks == 0


def test_only_a_prefix_cache_keeps_the_state_of_a_continued_sequence() -> None:
    for prefix_cache in (True, False):
        cache = cache_of(prefix_cache=prefix_cache)
        sequence = asking(some(50))
        begin(cache, sequence)
        cache.preempt(sequence)
        cache.let_go(sequence)
        assert bool(cache.memory.states) == prefix_cache
        cache.let_go(sequence)  # it has nothing else
        assert cache.memory.locked_bytes == 0


def test_a_sequence_reports_the_tier_of_its_prefix() -> None:
    cache = cache_of()
    state = state_of(some(50), is_from_disk=True)
    for tier in ("disk", "memory"):
        sequence = asking(some(60))
        assert cache.acquire(sequence, Match(state, 50)) and sequence.tier == tier
        cache.settled()
    cache.preempt(sequence)
    cache.let_go(sequence)
    cache.settled()
    assert cache.acquire(sequence, Match()) and sequence.tier == "device"


def test_another_layout_begins_empty_and_keeps_the_newest_cells_in_memory() -> None:
    cache = cache_of(4, memory_bytes=250)
    cache.copying.per_byte = 0.001
    for index, age in ((0, 1), (1, 3), (2, 2)):
        put(cache, index, some(50, 100 * index), last_used=age)
    limits = Limits(2, 1000, 512, 512, unified=True)
    cache.divide(limits)
    *saves, divided = cache.moves
    saved = [move for move in saves if isinstance(move, Save)]
    assert [move.slot for move in saved] == [1, 2], "the time is there, and room for two"
    assert divided == Divide(1000, 2, True) and cache.limits is limits
    assert len(cache.slots) == 2 and not any(slot.kept for slot in cache.slots)
    assert cache.memory.states == [move.state for move in saved]


@pytest.mark.parametrize(("at_once", "n_ready"), [(True, 0), (False, 45)])
def test_no_prefix_ends_within_a_part_that_is_computed_at_once(at_once: bool, n_ready: int) -> None:
    cache = cache_of()
    keep(cache, some(45))
    shown = asking(some(60))
    chunk = SimpleNamespace(n_tokens=20, n_positions=20, at_once=at_once)
    shown.spans = (Span(30, cast(Any, chunk), b"medium"),)
    assert cache.match(shown).n_ready == n_ready


def test_lost_cells_are_computed_from_the_first_token_on() -> None:
    cache = cache_of()
    sequence = asking(some(50))
    slot = begin(cache, sequence)
    slot.snapshots, slot.is_new = [Snapshot(4, b"")], True
    cache.start_over(slot.index)
    assert (sequence.n_computed, slot.n_cells) == (0, 0)
    assert not slot.snapshots and not slot.shared and not slot.is_new
    idle = put(cache, 3, some(9))
    cache.start_over(3)
    assert not idle.kept


# --- copies to memory ------------------------------------------------------------------------


@given(
    n_tokens=st.integers(1, 80),
    memory_bytes=st.sampled_from([0, 63, 64, 100, 1000]),
    n_locked=st.sampled_from([0, 40]),
    busy=st.booleans(),
    per_byte=st.sampled_from([1e-9, 0.0015, 0.05]),
    awaited=st.booleans(),
)
def test_which_states_are_saved(
    n_tokens: int, memory_bytes: int, n_locked: int, busy: bool, per_byte: float, awaited: bool
) -> None:
    """States that are long enough to be reused, fit beside locked ones, and do not take too
    long."""
    cache = cache_of(memory_bytes=memory_bytes)
    cache.copying.per_byte = per_byte
    if busy:
        run_in(cache, 3, [1])
    slot = put(cache, 0, some(n_tokens), last_used=7)
    slot.snapshots, slot.is_new, slot.scope = [Snapshot(9, b"")], True, Scope("one")
    locked = state_of(some(9, 500), n_locked, n_locks=1)
    if n_locked:
        cache.memory.states.append(locked)
    seconds = 2 * n_tokens * per_byte
    saves = 2 * n_tokens <= memory_bytes - n_locked
    if not awaited:
        saves = saves and n_tokens >= MIN_SHARED_TOKENS and seconds <= (0.1 if busy else 2.0)
    state = cache.save(slot, is_awaited=awaited)
    assert (state is not None) == saves
    assert cache.moves == ([Save(0, state)] if state is not None else [])
    if state is not None:
        assert (state.tokens, state.n_bytes, state.last_used) == (slot.kept, 2 * n_tokens, 7)
        assert (state.n_locks, state.is_new, state.scope) == (awaited, True, Scope("one"))
        assert state.snapshots == slot.snapshots and state.snapshots is not slot.snapshots
        assert state in cache.memory.states


def test_copies_of_one_step_share_its_time() -> None:
    cache = cache_of()
    cache.copying.per_byte = 0.0006  # 80 bytes: 0.048 s
    run_in(cache, 3, [1])
    slots = [put(cache, index, some(40, 100 * index)) for index in range(3)]
    assert [cache.save(slot) is not None for slot in slots] == [True, True, False]
    cache.take_moves()
    assert cache.save(slots[2]) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_memory_are_not_copied_again(kind: dict[str, Any]) -> None:
    cache = cache_of(**kind)
    longer = state_of(some(60), last_used=3)
    cache.memory.states.append(longer)
    slot = put(cache, 0, some(50), last_used=9)
    state = cache.save(slot)
    if kind:
        assert state is not longer and len(cache.moves) == 1, "it cannot be cut"
    else:
        assert state is longer and longer.last_used == 9 and not cache.moves
    same = put(cache, 1, some(60), last_used=1)
    cache.moves.clear()
    assert cache.save(same) is longer and not cache.moves
    assert longer.last_used == (3 if kind else 9)


def test_a_window_that_has_lost_cells_is_not_saved() -> None:
    cache = cache_of(window=8)
    slot = put(cache, 0, some(50))
    for first, saves in ((42, True), (43, False), (-1, False)):
        slot.first, cache.memory.states = first, []
        assert (cache.save(slot) is not None) == saves


def test_beside_streams_every_nth_copy_is_made_once_nothing_comes_back() -> None:
    cache = cache_of(3)
    stream = run_in(cache, 2, [1])

    def pushes_out(number: int, *, is_busy: bool) -> bool:
        n_before = len(cache.memory.states)
        put(cache, 0, some(40, 100 * number))
        cache.slots[2].owner = stream if is_busy else None
        cache.room()
        cache.take_moves()
        cache.settled()
        return len(cache.memory.states) > n_before

    made = [pushes_out(number, is_busy=True) for number in range(1, 11)]
    assert made == [True, True, True, True, False, False, True, False, False, True]
    assert not pushes_out(20, is_busy=True) and pushes_out(21, is_busy=False)
    state = cache.memory.states[0]
    own = asking(some(60, 100))
    own.saved = state
    state.n_locks = 1
    assert cache.acquire(own, Match(state, 40))
    assert not pushes_out(22, is_busy=True), "its own is no sign that others come back"
    cache.release(own, keep=False)
    assert cache.acquire(asking(some(60, 100)), Match(state, 40))
    cache.settled()
    assert [pushes_out(number, is_busy=True) for number in range(30, 35)] == [True] * 4 + [False]


@given(st.lists(st.sampled_from([0, 40]), min_size=4, max_size=4), st.booleans(), st.booleans())
def test_which_slots_are_evicted_next(sizes: list[int], unified: bool, runs: bool) -> None:
    cache = cache_of(5, unified=unified)
    if runs:
        run_in(cache, 4, some(9))
    for index, size in enumerate(sizes):
        put(cache, index, some(size), last_used=10 - index)
    kept = [index for index in (3, 2, 1, 0) if sizes[index]]  # the oldest first
    is_full = runs and len(kept) == 4
    expected = kept[:-1] if unified else kept[:1] if is_full else []
    assert [slot.index for slot in cache.next_out()] == expected


# --- snapshots -------------------------------------------------------------------------------


@given(
    n_tokens=st.integers(1, 400),
    n_computed=st.integers(0, 200),
    n_system=st.integers(0, 300),
    n_common=st.integers(0, 300),
    deterministic=st.booleans(),
)
def test_where_snapshots_are_due(
    n_tokens: int, n_computed: int, n_system: int, n_common: int, deterministic: bool
) -> None:
    """At likely positions: before the end, after the system prompt and after a prefix shared with
    another prompt; and every `SPACING` tokens. Not so close to an existing one that it saves
    nothing."""
    sequence = asking(some(n_tokens), deterministic=deterministic)
    sequence.n_computed, sequence.n_system = n_computed, n_system
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(books, "SPACING", 50)
        due = books._snapshots_due(sequence, n_common)
    likely = {n_tokens - 16, n_system} | ({n_common} if n_common else set())
    spaced = {n for n in range(1, n_tokens - 16) if n % 50 == 0}
    expected = {n: n in likely for n in likely | spaced if n >= n_computed + 16}
    assert due == ({} if deterministic else expected)


def test_only_memory_that_cannot_be_cut_takes_snapshots() -> None:
    assert not cache_of().takes_snapshots
    for kind in KINDS[1:]:
        assert cache_of(**kind).takes_snapshots
        assert not cache_of(memory_bytes=0, **kind).takes_snapshots
        assert not cache_of(prefix_cache=False, **kind).takes_snapshots
        cache = cache_of(**kind)
        sequence = asking(some(100))
        begin(cache, sequence)
        assert sequence.snapshot_at == {84: True}
    sequence = asking(some(100))
    begin(cache_of(), sequence)
    assert not sequence.snapshot_at


@pytest.mark.parametrize(("n_bytes", "keeps"), [(0, False), (1, True), (100, True), (101, False)])
def test_a_snapshot_that_fits_is_kept(n_bytes: int, keeps: bool) -> None:
    cache = cache_of(recurrent=True, memory_bytes=100)
    sequence = asking(some(100))
    slot = begin(cache, sequence)
    for n_computed, is_likely in ((84, True), (50, False)):
        sequence.snapshot_at = {n_computed: is_likely}
        sequence.n_computed, slot.snapshots = n_computed, []
        before = cache.now
        cache.keep_snapshot(sequence, bytes(n_bytes))
        assert [each.length for each in slot.snapshots] == [n_computed] * keeps
        for each in slot.snapshots:
            assert each.last_used == (cache.now if is_likely else 0)
            assert cache.now == before + is_likely
    slot.snapshots = [Snapshot(1, bytes(60), 1)]
    sequence.snapshot_at = {50: True}
    cache.keep_snapshot(sequence, bytes(60))
    assert [each.length for each in slot.snapshots] == [50], "the older one makes room"
    sequence.slot = None
    cache.keep_snapshot(sequence, bytes(9))
    assert len(slot.snapshots) == 1, "it has failed meanwhile"


# --- prices ----------------------------------------------------------------------------------

rates = st.floats(1e-9, 1.0)


@given(before=rates, measured=rates, n_bytes=st.integers(1, 1 << 40))
def test_a_price_moves_towards_what_was_measured(
    before: float, measured: float, n_bytes: int
) -> None:
    price = Price(before)
    price.paid(n_bytes, measured * n_bytes)
    assert price.per_byte == pytest.approx(before + 0.3 * (measured - before))
    price.paid(0, 0.0)  # nothing was copied, so nothing may be divided by 0
    for _ in range(40):
        price.paid(n_bytes, measured * n_bytes)
    assert price.per_byte == pytest.approx(measured, rel=1e-3, abs=1e-5)


def test_a_disk_is_expected_to_be_slower_than_memory() -> None:
    cache = cache_of()
    assert 0 < cache.copying.per_byte < cache.reading.per_byte


def test_a_copy_measures_bytes_and_seconds() -> None:
    cache = cache_of()
    slot = put(cache, 0, some(50))
    state = cache.save(slot)
    assert state is not None
    cache.copying.per_byte = 1.0
    assert cache.expected_seconds(slot) == 100
    state.n_bytes = 500
    cache.saved(state, 1000.0)
    assert cache.copying.per_byte == pytest.approx(1.3)
    assert cache.expected_seconds(slot) == pytest.approx(500 * 1.3)
    cache.memory.most_bytes = 499
    cache.saved(state, 500.0)
    assert not cache.memory.states, "it was larger than expected"


def test_a_price_at_which_nothing_is_copied_is_forgotten() -> None:
    """The reason for the last slow copy, such as a pause of the process, may be long gone."""
    cache = cache_of()
    slot = put(cache, 0, some(50))
    cache.copying.per_byte = 1.0
    refused = [cache.save(slot) for _ in range(20)]
    assert not any(refused)
    assert any(cache.save(slot) for _ in range(200))
    cheap = Price(1.0)
    cheap.per_byte = 0.5
    cheap.relax()
    assert cheap.per_byte == 0.5, "it is no reason"


# --- memory ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50)), st.integers(0, 50), st.integers(0, 9), st.booleans())
def test_the_longest_cut(lengths: list[int], n_common: int, n_more: int, anywhere: bool) -> None:
    kind = MemoryKind(recurrent=not anywhere)
    whole = anywhere or n_more == 0
    expected = max([0, *(each for each in lengths if each <= n_common)])
    found = kind.longest_cut(n_common, n_common + n_more, lengths)
    assert found == (n_common if whole else expected)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["state", "locked", "snapshot"]), st.integers(1, 60), st.integers(0, 99)
        ),
        max_size=8,
        unique_by=lambda each: each[2],
    )
)
def test_the_least_recently_used_are_evicted_until_the_rest_fits(
    things: list[tuple[str, int, int]],
) -> None:
    slots = [Slot(0), Slot(1)]
    memory = Memory(100, slots, MemoryKind())
    for what, n_bytes, last_used in things:
        if what == "snapshot":
            slots[0].snapshots.append(Snapshot(last_used, bytes(n_bytes), last_used))
        else:
            locks = int(what == "locked")
            memory.states.append(
                State([last_used], Scope(), n_bytes, last_used=last_used, n_locks=locks)
            )
    slots[1].snapshots = list(slots[0].snapshots)  # snapshots that slots share count once
    memory.fit()
    assert slots[1].snapshots == slots[0].snapshots
    n_bytes, gone = sum(n for _, n, _ in things), set()
    for what, size, last_used in sorted(things, key=lambda each: each[2]):
        if n_bytes > 100 and what != "locked":
            gone.add(last_used)
            n_bytes -= size
    left = {state.last_used for state in memory.states}
    left |= {each.last_used for each in slots[0].snapshots}
    assert left == {last_used for _, _, last_used in things} - gone
    assert memory.n_bytes == n_bytes
    assert memory.locked_bytes == sum(n for what, n, _ in things if what == "locked")


def test_a_state_beyond_the_budget_is_dropped_with_its_last_lock() -> None:
    """A state may be read for a request while another one is being written."""
    cache = cache_of(memory_bytes=100)
    first, second = (asking(some(60, 500 * number)) for number in range(2))
    first.saved, second.saved = (
        state_of(each.tokens[:40], 80, n_locks=1) for each in (first, second)
    )
    states = [first.saved, second.saved]
    states[0].n_locks = 2
    assert all(map(cache.memory.keep, states)) and cache.memory.states == states
    cache.let_go(first)
    assert cache.memory.states == states, "somebody else still needs it"
    first.saved = states[0]
    cache.let_go(first)
    assert cache.memory.states == states[1:]
    cache.let_go(second)
    assert cache.memory.states == states[1:], "there is room for it"


@given(
    st.lists(st.integers(0, 2), max_size=4),
    st.lists(st.integers(0, 2), max_size=4),
    st.sampled_from([Scope(), Scope("one", ((0, 1.0),)), Scope("one", ((0, 0.5),)), Scope("one")]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 4), max_size=2),
)
def test_a_state_replaces_those_that_it_makes_superfluous(
    new: list[int],
    old: list[int],
    scope: Scope,
    locked: bool,
    anywhere: bool,
    cuts: list[int],
) -> None:
    memory = Memory(1000, [], MemoryKind(recurrent=not anywhere))
    one = Scope("one", ((0, 1.0),))
    before = State(old, one, 10, n_locks=int(locked))
    memory.states = [before]
    state = State(new, scope, 10, snapshots=[Snapshot(length, b"") for length in cuts])
    assert memory.keep(state)
    reachable = anywhere or len(old) in {0, len(new), *cuts}
    superfluous = new[: len(old)] == old and reachable and scope == one and not locked
    assert (before in memory.states) == (not superfluous)
    found = memory.find(new, scope, len(new))
    assert state in found
    for prompt in (new + [9], [9, *new]):
        held = before in memory.states and scope == one and old[: len(prompt)] == prompt
        expected = [before] if held else []
        assert memory.find(prompt, scope, len(prompt)) == expected
    memory.drop(state)
    memory.drop(state)
    assert state not in memory.states
