"""Chooses and keeps the snapshots of memory that cannot be cut. Plain Python; engine thread.

Recurrent state and the cells of windows exist only for the last tokens. A prompt can reuse
another's beginning only at a length of which a snapshot was taken.
"""

from __future__ import annotations

from worker.engine.prefix_cache import Match, Slot
from worker.engine.sequence import Sequence
from worker.engine.step import Snapshot

SNAPSHOT_TAIL = 16
"""Tokens after the snapshot at a prompt's end: the next turn of a conversation may write them
differently, and the last one is always computed."""
SPACING = 2048
"""Tokens between the snapshots of a long prompt. A prompt that differs from its middle on computes
fewer than these again."""


class Snapshots:
    """The snapshots of all slots, which together have at most `most_bytes`."""

    def __init__(self, slots: list[Slot], most_bytes: int) -> None:
        self._slots, self._most_bytes = slots, most_bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of all snapshots; one that several slots share counts once."""
        every = {id(each): each for slot in self._slots for each in slot.snapshots}
        return sum(len(each.state) for each in every.values())

    def due(self, sequence: Sequence, match: Match | None) -> dict[int, bool]:
        """The lengths at which to take snapshots of a new prompt, each with whether a use is
        likely.

        Likely are: shortly before the prompt's end, after the chat's system prompt, and after a
        beginning that another prompt had too. The others are `SPACING` tokens apart.
        """
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
        """Keep a snapshot; the least recently used ones make room."""
        if not 0 < len(snapshot.state) <= self._most_bytes:
            return
        slot.snapshots.append(snapshot)
        self.fit()

    def fit(self) -> None:
        """Drop the least recently used snapshots until the rest fits."""
        while self.n_bytes > self._most_bytes:
            every = (each for slot in self._slots for each in slot.snapshots)
            oldest = min(every, key=lambda each: each.last_used)
            for slot in self._slots:
                slot.snapshots = [each for each in slot.snapshots if each is not oldest]
