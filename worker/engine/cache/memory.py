"""The second tier: states and snapshots in the host's memory, within one budget. Plain Python."""

from __future__ import annotations

from worker.engine.cache.moves import Snapshot, State
from worker.engine.cache.slots import Slot
from worker.llama.memory_kind import MemoryKind
from worker.wire.adapters import Scope

MOST_STATES = 1024
"""A request is compared with all of them, while streams wait. The budget of bytes has room for more
only if states have a few MiB, and those are soon computed again."""


class Memory:
    """The states, and the snapshots of states and slots, with at most `most_bytes` together.

    The least recently used state or snapshot is evicted first; a locked state is not evicted.
    """

    def __init__(self, most_bytes: int, slots: list[Slot], kind: MemoryKind) -> None:
        self.most_bytes, self._slots, self._kind = most_bytes, slots, kind
        self.states: list[State] = []

    @property
    def n_bytes(self) -> int:
        """Bytes in use; a snapshot that several slots and states share counts once."""
        snapshots = sum([len(each.data) for each in self._snapshots()])
        return snapshots + sum([state.n_bytes for state in self.states])

    @property
    def locked_bytes(self) -> int:
        return sum([state.n_bytes for state in self.states if state.n_locks])

    def find(self, tokens: list[int], scope: Scope, n_same: int) -> list[State]:
        """The states that begin with at least the first `n_same` of these tokens."""
        head = tokens[:n_same]
        return [s for s in self.states if s.scope == scope and _begins(s.tokens, head)]

    def keep(self, state: State) -> bool:
        """Keep a state, in place of those that it makes superfluous; false if there is no room."""
        self.states = [
            each
            for each in self.states
            if each.n_locks or each.scope != state.scope or not self._contains(state, each)
        ]
        self.states.append(state)
        self.fit()
        return state in self.states

    def unlock(self, state: State) -> None:
        """Take one lock off a state. Without any, it may be evicted."""
        state.n_locks -= 1
        self.fit()

    def drop(self, state: State) -> None:
        if state in self.states:
            self.states.remove(state)

    def fit(self) -> None:
        """Evict the least recently used until the rest is within the budget."""
        while (are_many := len(self.states) > MOST_STATES) or self.n_bytes > self.most_bytes:
            going: list[State | Snapshot] = [each for each in self.states if not each.n_locks]
            if not are_many:
                going += self._snapshots()
            if not going:
                return
            oldest = min(going, key=lambda each: each.last_used)
            if isinstance(oldest, State):
                self.states.remove(oldest)
                continue
            for holder in self._holders():
                if oldest in holder.snapshots:
                    holder.snapshots = [each for each in holder.snapshots if each is not oldest]

    def _contains(self, state: State, other: State) -> bool:
        """Whether a prompt can continue from `state` wherever it can from `other`."""
        n_other, cuts = len(other.tokens), (each.length for each in state.snapshots)
        return _begins(state.tokens, other.tokens) and (
            self._kind.longest_cut(n_other, len(state.tokens), cuts) == n_other
        )

    def _snapshots(self) -> list[Snapshot]:
        return list({id(s): s for each in self._holders() for s in each.snapshots}.values())

    def _holders(self) -> list[Slot | State]:
        return [*self._slots, *self.states]


def _begins(tokens: list[int], head: list[int]) -> bool:
    """Whether `tokens` begin with all of `head`. Conversations often differ only after thousands of
    tokens, so the last one is compared first."""
    n = len(head)
    return not n or (len(tokens) >= n and tokens[n - 1] == head[-1] and tokens[:n] == head)
