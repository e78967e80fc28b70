"""Whose turn it is: llama.cpp applies one set of adapters to a whole batch. Engine thread.

Running sequences with equal adapters form a group, which shares batches; a deterministic sequence
is a group of its own. Groups take turns in a circle, so that each waits for at most one turn of
each other. A change of adapters costs as much as a small model's step, so a turn has a few steps,
as long as the others do not wait for longer than a step may take. Plain Python.
"""

from __future__ import annotations

from worker.engine.pace import Pace
from worker.engine.sequence import Sequence
from worker.wire.adapters import Applied

MOST_STEPS = 4
"""The most steps of one turn. A step with prompt tokens ends its turn: it may take all its time."""

Key = tuple[Applied, int]


class Turns:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._groups: dict[Key, list[Sequence]] = {}
        """In the order of their turns, the current one first; each in the order of admission."""
        self._n_steps = 0
        """The steps of this turn so far."""
        self._odd: set[Key] = set()
        """Groups that have had an odd number of steps with prompts."""

    @property
    def are_shared(self) -> bool:
        """Whether there is more than one group."""
        return len(self._groups) > 1

    def join(self, sequence: Sequence) -> None:
        self._groups.setdefault(_key(sequence), []).append(sequence)

    def leave(self, sequence: Sequence) -> None:
        key = _key(sequence)
        is_first = next(iter(self._groups)) == key
        self._groups[key].remove(sequence)
        if not self._groups[key]:
            del self._groups[key]
            self._odd.discard(key)
            if is_first:
                self._n_steps = 0

    def next(self) -> list[Sequence]:
        """The group that the next step computes. There must be one."""
        key = next(iter(self._groups))
        if self._n_steps >= self._most_steps(len(self._groups[key])):
            self._groups[key] = self._groups.pop(key)
            key, self._n_steps = next(iter(self._groups)), 0
        self._n_steps += 1
        return self._groups[key]

    def oldest_first(self) -> bool:
        """Whether the oldest prompt comes first in this step with prompts: every other time of the
        group whose turn it is. With one count for all groups, of two that alternate only one would
        ever have its oldest prompt first."""
        key = next(iter(self._groups))
        self._odd ^= {key}
        return key not in self._odd

    def end(self) -> None:
        """End this turn with the step that is planned."""
        self._n_steps = MOST_STEPS

    def _most_steps(self, n_rows: int) -> int:
        seconds = self._pace.decode_seconds(n_rows) * (len(self._groups) - 1)
        if not seconds:
            return MOST_STEPS
        return max(min(int(self._pace.target_seconds / seconds), MOST_STEPS), 1)


def _key(sequence: Sequence) -> Key:
    request = sequence.request
    return request.adapters, sequence.request_id if request.deterministic else -1
