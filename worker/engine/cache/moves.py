"""What is kept outside of the cells, and the moves that change the cells. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from worker.wire.adapters import Scope


@dataclass(slots=True, eq=False)
class Snapshot:
    """The part of a sequence's memory after `length` tokens that cannot be cut to that length
    later: its recurrent state or the cells of its windows. It is valid only while its other cells
    exist."""

    length: int
    data: bytes
    last_used: int = 0


@dataclass(slots=True, eq=False)
class State:
    """All memory of a sequence after `tokens`, in host memory.

    It is in the books from the moment that its copy is planned; the copy brings the data.
    """

    tokens: list[int]
    scope: Scope
    n_bytes: int
    """Of `data`; expected until it is there."""
    data: memoryview | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    """Of lengths to which the state can be cut."""
    last_used: int = 0
    n_locks: int = 0
    """Requests that will go on from it, and the writing to the disk. Locked, it stays."""
    is_new: bool = False
    """Whether it has not been offered to the disk yet."""
    is_from_disk: bool = False
    """Whether it was read from the disk and nobody has gone on from it yet."""

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
    """Whether the last batch has computed the newest of them and all that go."""


class Copy(NamedTuple):
    """Copy the first `length` tokens of `source` to the empty slot, likewise."""

    source: int
    slot: int
    length: int
    snapshot: Snapshot | None = None


class Save(NamedTuple):
    """Copy all memory of a slot to a state."""

    slot: int
    state: State


class Restore(NamedTuple):
    """Put a state into the empty slot, then keep its first `length` tokens, likewise."""

    slot: int
    state: State
    length: int
    snapshot: Snapshot | None = None


class Divide(NamedTuple):
    """Begin anew with empty cells, in one pool or in equal parts for so many slots."""

    n_cells: int
    n_slots: int
    unified: bool


Move = Truncate | Copy | Save | Restore | Divide
