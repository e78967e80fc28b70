"""Computes embeddings and ranks: texts share a decode, even across requests.

Intake threads submit the texts. The engine thread computes a group of them between two steps of the
loop, after which other waiting work gets its turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.errors import Cancelled, WorkerError
from worker.llama.pooled import PooledContext, scaled
from worker.wire.adapters import Applied
from worker.wire.black_box import LOOP
from worker.wire.messages import Answered, Event, Failed, Started

MOST_OUTPUT_BYTES = 1 << 27
"""The limit of an answer with a vector of each token: half of what the pipe takes in one frame."""


@dataclass(slots=True)
class _Texts:
    """One request: the texts that are left, and the vectors of the others."""

    request_id: int
    left: deque[list[int]]
    norm: int
    adapters: Applied
    vectors: list[tuple[int, bytes]] = field(default_factory=list)
    n_left: int = field(init=False)
    """Tokens of the texts that are left. With a hundred requests of thousands of texts, counting
    them in each turn would take longer than a small model computes."""

    def __post_init__(self) -> None:
        self.n_left = sum(map(len, self.left))


Group = list[tuple[_Texts, list[list[int]]]]
"""Requests, and the texts of each that are computed together."""


class Pooling:
    def __init__(
        self,
        call: Callable[[Callable[[], None]], None],
        compute: PooledContext,
        send: Callable[[list[Event]], None],
        stats: Callable[[], Event],
        in_hand: memoryview[int],
        count_step: Callable[[float], None],
    ) -> None:
        """`call` runs an action on the engine thread between two steps; any thread may use it.
        `count_step` gets the seconds that each batch took to decode."""
        self._call, self._compute, self._send, self._stats = call, compute, send, stats
        self._count_step = count_step
        self.token_bytes = compute.token_bytes
        """What each token adds to an answer if nothing is pooled; otherwise 0."""
        self._in_hand = in_hand
        self._requests: dict[int, _Texts] = {}
        """In the order of arrival."""
        self._oldest_first = True
        self._is_due = False
        """Whether a turn is queued."""

    # --- called by other threads --------------------------------------------------------------

    def take(self, request_id: int, texts: list[list[int]], norm: int, adapters: Applied) -> None:
        """Queue a request's texts. `norm` is how vectors are normalised, as in `work.Embed`."""
        request = _Texts(request_id, deque(texts), norm, adapters)
        self._call(lambda: self._add(request))

    def cancel(self, request_id: int) -> None:
        """Drop a request and its remaining texts; one that has ended is ignored."""
        self._call(lambda: self._cancel(request_id))

    # --- the engine thread -------------------------------------------------------------------

    def _add(self, request: _Texts) -> None:
        self._requests[request.request_id] = request
        self._ask_for_turn()

    def _cancel(self, request_id: int) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._send([Failed(request_id, Cancelled("the request was cancelled"))])

    def _ask_for_turn(self) -> None:
        """Queue a turn after what has arrived meanwhile."""
        if self._requests and not self._is_due:
            self._is_due = True
            self._call(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        group = self._group()
        if group:
            started = [each for each, _ in group if not each.vectors]
            now = time.monotonic()
            self._send([Started(each.request_id, 0, at=now) for each in started])
            events = self._computed(group)
            self._send([*events, self._stats()])
        self._ask_for_turn()

    def _group(self) -> Group:
        """The texts of the next decode. The requests with the least left come first, so that one
        short text does not wait for a hundred long ones. In every other turn the oldest request is
        first, so that each makes progress. All have the adapters of the first.
        """
        oldest = next(iter(self._requests.values()), None)
        self._oldest_first = not self._oldest_first
        first = oldest if self._oldest_first else None
        order = sorted(self._requests.values(), key=lambda each: (each is not first, each.n_left))
        group: Group = []
        n_texts = n_tokens = 0
        for request in order:
            if request.adapters != order[0].adapters:
                continue
            taken = []
            for text in request.left:
                is_full = n_tokens + len(text) > self._compute.most_tokens
                if n_texts == self._compute.most_texts or (n_texts and is_full):
                    break
                taken.append(text)
                n_texts, n_tokens = n_texts + 1, n_tokens + len(text)
            if not taken:
                break
            group.append((request, taken))
        return group

    def _computed(self, group: Group) -> list[Event]:
        """Compute the texts of a group. One that cannot be computed fails only its own request."""
        self._in_hand[LOOP] = group[0][0].request_id if len(group) == 1 else 0
        began = time.monotonic()
        try:
            texts = [text for _, taken in group for text in taken]
            vectors = self._compute(texts, group[0][0].adapters)
            self._count_step(time.monotonic() - began)
        except WorkerError as error:
            if len(group) > 1:
                return [event for one in group for event in self._computed([one])]
            ((request, _),) = group
            del self._requests[request.request_id]
            return [Failed(request.request_id, error)]
        finally:
            self._in_hand[LOOP] = 0
        ended: list[Event] = []
        computed = iter(vectors)
        for request, taken in group:
            for text in taken:
                request.left.popleft()
                request.n_left -= len(text)
                request.vectors.append((len(text), scaled(next(computed), request.norm)))
            if not request.left:
                del self._requests[request.request_id]
                ended.append(Answered(request.request_id, request.vectors))
        return ended
