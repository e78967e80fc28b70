"""Computes embeddings and ranks: several texts share a decode.

Intake threads submit the texts, the engine thread computes them between two steps of the loop.
After each group of texts, other waiting work gets its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from worker.engine.loop import Loop
from worker.errors import Cancelled, WorkerError
from worker.llama.pooled import PooledContext
from worker.wire.black_box import LOOP
from worker.wire.messages import Answered, Event, Failed, Started


@dataclass(slots=True)
class _Texts:
    """The texts of one request and their outputs so far."""

    tokens: list[list[int]]
    norm: int
    vectors: list[tuple[int, bytes]] = field(default_factory=list)


class Pooling:
    def __init__(
        self,
        loop: Loop,
        compute: PooledContext,
        send: Callable[[list[Event]], None],
        in_hand: memoryview[int],
    ) -> None:
        self._loop, self._compute, self._send, self._in_hand = loop, compute, send, in_hand
        self._requests: dict[int, _Texts] = {}

    def take(self, request_id: int, texts: list[list[int]], norm: int) -> None:
        """`norm` is what vectors are scaled by; `work.Embed` says how."""
        self._requests[request_id] = _Texts(texts, norm)
        self._loop.call(lambda: self._compute_next(request_id))

    def cancel(self, request_id: int) -> bool:
        """Forget the request, which then fails at its next turn; returns whether it was here."""
        return self._requests.pop(request_id, None) is not None

    def _compute_next(self, request_id: int) -> None:
        texts = self._requests.get(request_id)
        if texts is None:
            self._send([Failed(request_id, Cancelled("the request was cancelled"))])
            return
        n_done = len(texts.vectors)
        events: list[Event] = [] if n_done else [Started(request_id, 0)]
        self._in_hand[LOOP] = request_id
        try:
            group = self._group(texts.tokens[n_done : n_done + self._compute.most_texts])
            texts.vectors += zip(map(len, group), self._compute(group, texts.norm), strict=True)
        except WorkerError as error:
            self._requests.pop(request_id, None)
            events.append(Failed(request_id, error))
        else:
            if len(texts.vectors) < len(texts.tokens):
                self._loop.call(lambda: self._compute_next(request_id))
            elif self._requests.pop(request_id, None) is not None:
                events.append(Answered(request_id, texts.vectors))
            else:
                events.append(Failed(request_id, Cancelled("the request was cancelled")))
        self._in_hand[LOOP] = 0
        self._send([*events, self._loop.stats()])

    def _group(self, texts: list[list[int]]) -> list[list[int]]:
        """As many of the texts as one decode can compute, at least one."""
        n_tokens = 0
        for index, text in enumerate(texts):
            n_tokens += len(text)
            if index and n_tokens > self._compute.most_tokens:
                return texts[:index]
        return texts
