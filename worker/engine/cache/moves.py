"""What is kept outside of the cells, and the moves that change the cells. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.wire.adapters import Scope


@dataclass(slots=True, eq=False)
class Snapshot:
    """The part of a sequence's memory after `length` tokens that cannot be cut to that length
    later: its recurrent state or the cells of its windows. It is valid only while the sequence's
    other cells exist."""

    length: int
    data: bytes
    last_used: int = 0


@dataclass(slots=True, eq=False)
class State:
    """All memory of a sequence after `tokens`, in host memory.

    `Memory` lists it as soon as its copy is planned; the copy brings the data.
    """

    tokens: list[int]
    scope: Scope
    n_bytes: int
    """The size of `data`; an estimate until it is there."""
    data: memoryview | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    """Snapshots of the lengths to which the state can be cut."""
    last_used: int = 0
    n_locks: int = 0
    """Requests that will continue from it, plus a write to the disk. Locked, it is not evicted."""
    is_new: bool = False
    """Whether it has not been offered to the disk yet."""
    is_from_disk: bool = False
    """Whether it was read from the disk and no request has continued from it yet."""

    @property
    def all_bytes(self) -> int:
        """With its snapshots, which several states and slots may share."""
        return self.n_bytes + sum([len(each.data) for each in self.snapshots])


class Truncate(NamedTuple):
    """Keep the first `length` tokens of a slot, with a snapshot of that length if needed."""

    slot: int
    length: int
    snapshot: Snapshot | None = None
    is_recent: bool = False
    """Whether the last batch has computed the last kept token and all that are removed."""


class Copy(NamedTuple):
    """Copy the first `length` tokens of `source` to the empty slot, with a snapshot if needed."""

    source: int
    slot: int
    length: int
    snapshot: Snapshot | None = None


class Save(NamedTuple):
    """Copy all memory of a slot to a state."""

    slot: int
    state: State


class Restore(NamedTuple):
    """Put a state into the empty slot, then keep its first `length` tokens, as `Truncate` does."""

    slot: int
    state: State
    length: int
    snapshot: Snapshot | None = None


class Divide(NamedTuple):
    """Start over with empty cells, in one pool or in equal parts for `n_slots`."""

    n_cells: int
    n_slots: int
    unified: bool


Move = Truncate | Copy | Save | Restore | Divide
