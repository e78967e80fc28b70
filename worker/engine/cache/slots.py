"""The first tier: slots, what their cells hold, and which cells they share. Plain Python.

In one pool, a copy shares the cells of its source. They stay in use as long as any slot that shares
them holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from worker.engine.cache.moves import Snapshot
from worker.engine.sequence import Sequence
from worker.wire.adapters import Scope


@dataclass(slots=True, eq=False)
class Shared:
    """Consecutive cells that several slots hold at the same place."""

    n_cells: int


@dataclass(slots=True, eq=False)
class Slot:
    """A llama.cpp sequence id and the contents of its cells."""

    index: int
    owner: Sequence | None = None
    kept: list[int] = field(default_factory=list)
    """The tokens whose cells an idle slot keeps; empty while the slot has an owner."""
    scope: Scope = Scope()
    snapshots: list[Snapshot] = field(default_factory=list)
    """Snapshots of these cells, or of those that they were copied from."""
    shared: list[Shared] = field(default_factory=list)
    """Its first cells, as far as they are or were shared; the others are its own."""
    first: int = 0
    """The first position that all layers of a windowed model still have; -1 if there is none."""
    last_used: int = 0
    is_new: bool = False
    """Whether what it keeps has not been offered to the disk yet."""

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cells, including those that the owner still has to compute."""
        return self.owner.tokens if self.owner is not None else self.kept

    @property
    def n_cells(self) -> int:
        return self.owner.n_computed if self.owner is not None else len(self.kept)

    @property
    def n_shared(self) -> int:
        return sum([each.n_cells for each in self.shared])


def count_cells(slots: Iterable[Slot], size_of: Callable[[Slot], int]) -> int:
    """The cells of these slots, shared ones counted once; `size_of` returns how many a slot has."""
    n_own, shared = 0, set()
    for slot in slots:
        n_own += size_of(slot) - slot.n_shared
        shared.update(slot.shared)
    return n_own + sum([each.n_cells for each in shared])


def share(source: Slot, target: Slot, length: int, slots: Iterable[Slot]) -> None:
    """Record that the empty slot `target` has the first `length` cells of `source`."""
    target.shared = _first(source, length, slots)
    if (n_new := length - target.n_shared) > 0:
        new = Shared(n_new)
        target.shared.append(new)
        source.shared.append(new)


def unshare(slot: Slot, length: int, slots: Iterable[Slot]) -> None:
    """Record that a slot gives up all but its first `length` cells."""
    slot.shared = _first(slot, length, slots)


def _first(slot: Slot, length: int, slots: Iterable[Slot]) -> list[Shared]:
    """The shared parts of a slot's first `length` cells. A part that reaches beyond them is split
    there, for all slots that have it."""
    parts: list[Shared] = []
    for part in list(slot.shared):
        if length > 0:
            if length < part.n_cells:
                rest = Shared(part.n_cells - length)
                part.n_cells = length
                for each in slots:
                    if part in each.shared:
                        each.shared.insert(each.shared.index(part) + 1, rest)
            parts.append(part)
            length -= part.n_cells
    return parts
