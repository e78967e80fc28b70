"""Finds cells of the KV cache that a new prompt can reuse. Plain Python; engine thread.

The unit of reuse is the slot: a finished sequence's cells stay in its slot until the slot is
needed, least recently used first. A new prompt takes over an idle slot with the same beginning, or
copies the common beginning from any slot, even one that is running. Recurrent and windowed memory
cannot be cut to an arbitrary length: reuse then needs a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from worker.engine.backend import Backend
from worker.engine.pace import TILE_TOKENS
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.step import Snapshot

MIN_SHARED_TOKENS = 32
"""A shorter common beginning is not reused."""
MIN_LONG_TOKENS = 1024
"""Behind a shorter beginning, the rows of an incomplete tile cost little."""
MIN_AWAITED_TOKENS = 8
"""A prompt does not wait for fewer common tokens than this."""


@dataclass(slots=True, eq=False)
class Slot:
    """A llama.cpp sequence id and the contents of its cells."""

    index: int
    owner: EngineSequence | None = None
    kept: list[int] = field(default_factory=list)
    """The tokens whose cells an idle slot keeps; empty while the slot has an owner."""
    salt: str | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    """Snapshots of these cells, or of those that they were copied from."""
    last_used: int = 0
    is_unsaved: bool = False
    """Whether what it keeps has not been offered to the store yet."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens in the cells, including those that the owner still has to compute."""
        return self.owner.tokens if self.owner is not None else self.kept

    @property
    def n_cells(self) -> int:
        return self.owner.n_computed if self.owner is not None else len(self.kept)

    @property
    def is_idle(self) -> bool:
        return self.owner is None


@dataclass(frozen=True, slots=True)
class Match:
    """A slot whose tokens begin like a prompt."""

    slot: Slot
    n_common: int
    """The number of common tokens at the beginning, computed or not."""
    n_ready: int
    """The number of them that can be reused now."""
    n_soon: int
    """The number that can be reused once the slot's owner has computed them."""
    snapshot: Snapshot | None = None
    """The snapshot needed to reuse `n_ready` tokens, if any."""

    @property
    def is_worth_waiting(self) -> bool:
        """Whether the slot's owner is computing what this prompt needs: it should not be computed
        twice."""
        return self.n_soon - self.n_ready >= MIN_AWAITED_TOKENS

    @property
    def uses_most(self) -> bool:
        """Whether at least half of what an idle slot keeps is reused."""
        return 2 * self.n_ready >= len(self.slot.kept)


def find_match(
    slots: Iterable[Slot], sequence: EngineSequence, backend: Backend, *, snapshots: bool
) -> Match | None:
    """The slot with the longest common beginning, among slots with the same `cache_salt`.

    The prompt's last token is never reused: its logits are needed for sampling.
    """
    prompt = sequence.tokens[:-1]
    if len(prompt) < MIN_SHARED_TOKENS:
        return None
    head, salt = prompt[:MIN_SHARED_TOKENS], sequence.request.cache_salt
    best: Match | None = None
    for slot in slots:
        owner, tokens = slot.owner, slot.tokens
        if tokens[:MIN_SHARED_TOKENS] != head or slot.salt != salt:
            continue
        if owner is not None and owner.request.deterministic:
            continue
        match = _match(slot, common_length(tokens, prompt), backend, snapshots)
        if best is None or (match.n_soon, match.n_ready) > (best.n_soon, best.n_ready):
            best = match
    return best


def leave_a_tile(match: Match, n_prompt: int) -> Match:
    """Reuse a little less where that leaves a whole tile of the attention to compute.

    On a CPU the rows of an incomplete tile take several times as long behind a long beginning: with
    SmolLM2-135M behind 4,096 tokens, 63 rows took 1.4 s and 64 rows 0.6 s, as 24 rows did.
    """
    n_left = n_prompt - match.n_ready
    if (
        match.snapshot is not None
        or match.n_soon > match.n_ready
        or match.n_ready < MIN_LONG_TOKENS
        or not TILE_TOKENS // 2 <= n_left <= TILE_TOKENS
    ):
        return match
    # One more than a tile: beside decode rows, the first row is computed with them.
    n_ready = n_prompt - TILE_TOKENS - 1
    return replace(match, n_ready=n_ready, n_soon=n_ready)


def _match(slot: Slot, n_common: int, backend: Backend, snapshots: bool) -> Match:
    n_ready, snapshot = min(n_common, slot.n_cells), None
    if not backend.can_cut(slot.index, n_ready):
        usable = (s for s in slot.snapshots if s.length <= n_ready)
        snapshot = max(usable, key=lambda s: s.length, default=None)
        n_ready = snapshot.length if snapshot is not None else 0
    if n_ready < MIN_SHARED_TOKENS:
        n_ready, snapshot = 0, None
    n_soon = n_ready
    if n_common > slot.n_cells and (backend.cuts_anywhere or snapshots):
        n_soon = n_common
    return Match(slot, n_common, n_ready, n_soon, snapshot)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal tokens at the beginning, by bisection with slices, which C compares."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
