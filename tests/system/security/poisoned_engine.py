"""The engine process with a fault that a request can trigger, by its seed.

No request is known to crash the real one; this simulates one that does: a native abort or an error
in Python, at the request's intake, at its fifth token or at its end.
"""

from __future__ import annotations

import os
from typing import Any

from worker.engine import process, start
from worker.engine.loop import Loop
from worker.engine.sequence import Sequence
from worker.llama.sampler import Sampler

ABORTS_IN_INTAKE, ABORTS_IN_LOOP, RAISES_IN_INTAKE, RAISES_IN_SAMPLER, RAISES_IN_LOOP = range(
    661, 666
)


class PoisonedSampler(Sampler):
    def __init__(self, model: Any, sampling: Any, *rest: Any) -> None:
        super().__init__(model, sampling, *rest)
        self._seed, self._n = sampling.seed, 0
        if self._seed == ABORTS_IN_INTAKE:
            os.abort()
        if self._seed == RAISES_IN_INTAKE:
            raise LookupError("a fault of the engine's own")

    def sample(self, context: Any, row: int) -> int:
        self._n += 1
        if self._n == 5 and self._seed == ABORTS_IN_LOOP:
            os.abort()
        if self._n == 5 and self._seed == RAISES_IN_SAMPLER:
            raise LookupError("a fault of the sampler's own")
        return super().sample(context, row)


class PoisonedLoop(Loop):
    def _release(self, sequence: Sequence, *, keep_cells: bool) -> None:
        if sequence.request.sampling.seed == RAISES_IN_LOOP:
            raise LookupError("a fault of the engine's own")
        super()._release(sequence, keep_cells=keep_cells)


if __name__ == "__main__":
    vars(start).update(Sampler=PoisonedSampler, Loop=PoisonedLoop)
    process.main()
