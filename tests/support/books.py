"""Compares the bookkeeping of the engine's cache with the backend's state."""

from __future__ import annotations

from collections.abc import Callable

from worker.engine.cache.cache import Cache


def check(cache: Cache, last_position: Callable[[int], int]) -> None:
    """Check the books; for use between two steps."""
    assert not cache.moves, "all moves were carried out"
    for slot in cache.slots:
        last = last_position(slot.index)
        n_cells = cache.position(slot.index, slot.n_cells)
        assert last + 1 == n_cells, f"slot {slot.index}: {last + 1}, not {n_cells}"
        assert slot.n_shared <= slot.n_cells, f"slot {slot.index} shares what it has not"
        assert slot.owner is None or slot.owner.slot == slot.index
        assert slot.owner is None or not slot.kept
    memory = cache.memory
    assert memory.n_bytes <= max(memory.most_bytes, memory.locked_bytes)
