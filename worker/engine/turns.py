"""Whose turn it is: llama.cpp applies one set of adapters to a whole batch. Engine thread.

Running sequences of equal adapters are a group, which shares batches; a deterministic sequence is a
group of its own. Groups take turns in a circle, so that each waits for one turn of each other at
most. A change of adapters costs as much as a small model's step, so a turn has a few steps, as long
as the others do not wait for longer than a step may take. Plain Python.
"""

from __future__ import annotations

from worker.engine.pace import Pace
from worker.engine.sequence import Sequence
from worker.wire.adapters import Applied

MOST_STEPS = 4
"""Of one turn. A step with prompt tokens is a turn of its own: it may take its whole time."""

Key = tuple[Applied, int]


class Turns:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._groups: dict[Key, list[Sequence]] = {}
        """Each in the order of admission; the first one's turn is under way."""
        self._n_steps = 0
        """Of this turn, so far."""
        self._odd: set[Key] = set()
        """Groups of which the oldest prompt came first in their last step with prompts."""

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
        """The group that the next step is of; there is one."""
        key = next(iter(self._groups))
        if self._n_steps >= self._most_steps(len(self._groups[key])):
            self._groups[key] = self._groups.pop(key)
            key, self._n_steps = next(iter(self._groups)), 0
        self._n_steps += 1
        return self._groups[key]

    def oldest_first(self) -> bool:
        """Whether the oldest prompt of the group whose turn it is comes first in a step with
        prompts: every other time of this group. One count for all groups would always give it to
        the same one of two that alternate."""
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
