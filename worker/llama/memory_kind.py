"""What llama.cpp's memory of a model supports, which determines what a cache can keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKind:
    """What can be done with the memory of a sequence."""

    recurrent: bool = False
    """Whether it has a recurrent state, which exists only for the last token."""
    window: int = 0
    """The number of tokens after which some layers drop a cell; 0 if none does."""
    has_still_tokens: bool = False
    """Whether some tokens of a picture or sound do not advance the position of what follows."""
    most_back: int = 1 << 16
    """How many tokens can be taken back right after the pass that computed them: all, unless there
    is a recurrent state. By then, no window has lost a cell that it needs without them."""
    moves_states: bool = False
    """Whether a saved state fits into every layout of the cells, because the memory is a single
    cache that keeps all cells."""

    @property
    def cuts_anywhere(self) -> bool:
        """Whether a sequence can be cut to any length."""
        return not self.recurrent and not self.window

    def can_cut(self, length: int, n_held: int, first: int) -> bool:
        """Whether a sequence of `n_held` tokens can be cut to `length` of them without a snapshot.

        Newer cells overwrite the older ones of a window: `first` is the first position that all
        layers still have, -1 if a window has lost all of its cells.
        """
        if self.recurrent and length and length != n_held:
            return False
        return not self.window or 0 <= first <= max(length - self.window, 0)

    def longest_cut(self, n_common: int, n_tokens: int, snapshots: Iterable[int]) -> int:
        """The longest length up to `n_common` to which a state of `n_tokens`, with snapshots of
        these lengths, can be cut."""
        if self.cuts_anywhere or n_common == n_tokens:
            return n_common
        return max((length for length in snapshots if length <= n_common), default=0)
