"""What is kept aside of memory that cannot be cut back: where in a prompt, and how much of it.

Plain Python; engine thread. Recurrent state and the cells of windows exist for the last tokens
alone, so a prompt can go on from another's beginning only where a snapshot of that was taken.
"""

from __future__ import annotations

from worker.engine.prefix_cache import Match, Slot
from worker.engine.sequence import Sequence
from worker.engine.step import Snapshot

SNAPSHOT_TAIL = 16
"""Tokens at a prompt's end that come after its snapshot: what the next turn of a conversation may
write differently, and at least the last one, which is always computed."""
SPACING = 2048
"""Tokens of a long prompt between snapshots: another that leaves it in its middle computes fewer
than these again."""


class Snapshots:
    """The snapshots of all slots, which together take no more than `most_bytes`."""

    def __init__(self, slots: list[Slot], most_bytes: int) -> None:
        self._slots, self._most_bytes = slots, most_bytes

    @property
    def n_bytes(self) -> int:
        """What they take, those of several slots once."""
        every = {id(each): each for slot in self._slots for each in slot.snapshots}
        return sum(len(each.state) for each in every.values())

    def due(self, sequence: Sequence, match: Match | None) -> dict[int, bool]:
        """The numbers of tokens of a new prompt after which one is taken, and whether it is likely
        to be used: shortly before the prompt's end, behind the chat's system prompt, and behind a
        beginning that another prompt had too. The others are a fixed number of tokens apart."""
        if sequence.request.deterministic:
            return {}
        last = len(sequence.tokens) - SNAPSHOT_TAIL
        ends = dict.fromkeys(range(SPACING, last, SPACING), False)
        ends |= {last: True, sequence.n_system: True}
        if match is not None:
            ends[match.n_common] = True
        first = sequence.n_computed + SNAPSHOT_TAIL
        return {end: is_likely for end, is_likely in ends.items() if end >= first}

    def keep(self, slot: Slot, snapshot: Snapshot) -> None:
        """Add one, at the cost of those that are long unused."""
        if not 0 < len(snapshot.state) <= self._most_bytes:
            return
        slot.snapshots.append(snapshot)
        self.fit()

    def fit(self) -> None:
        """Drop those that are the longest unused until the rest fits."""
        while self.n_bytes > self._most_bytes:
            every = (each for slot in self._slots for each in slot.snapshots)
            oldest = min(every, key=lambda each: each.last_used)
            for slot in self._slots:
                slot.snapshots = [each for each in slot.snapshots if each is not oldest]
