"""The engine process's intake: receives commands, prepares requests and submits them to the loop.

Prompts are rendered and tokenised, and samplers built, while the engine thread computes: any thread
may read llama.cpp's vocabulary, and native calls release the GIL. The receiving thread only sorts
commands, so a cancel overtakes all work. One thread prepares small requests and another one the
long ones, so that a small request never waits for a long prompt.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from worker.confinement.bounded import Gone
from worker.engine.loop import Loop
from worker.engine.pooling import MOST_OUTPUT_BYTES, Pooling
from worker.engine.sequence import NO_LIMIT, Sequence
from worker.engine.text.prompt import PromptBuilder
from worker.errors import Cancelled, InferenceFailed, InvalidRequest, WorkerError
from worker.llama.pooled import UNSCALED, PooledContext
from worker.llama.reasoning import PROMPT_END_TOKENS
from worker.llama.sampler import Sampler
from worker.observability.logs import get_logger
from worker.wire.black_box import LONG_INTAKE, SMALL_INTAKE, BlackBox
from worker.wire.messages import (
    Accepted,
    Answered,
    Cancel,
    Command,
    EndReasoning,
    Event,
    Failed,
    Preparing,
    Submit,
)
from worker.wire.sampling import Sampling
from worker.wire.work import (
    ApplyTemplate,
    CountPrompt,
    Detokenize,
    Embed,
    InferenceRequest,
    ProveResidency,
    Rank,
    Tokenize,
    Work,
    placed,
)

log = get_logger()

LONG_WORK = 50_000
"""A request with more characters or token ids than this is prepared by the thread for long ones."""


class Intake:
    def __init__(
        self,
        loop: Loop,
        prompts: PromptBuilder,
        send: Callable[[list[Event]], None],
        *,
        make_sampler: Callable[[Sampling, list[int]], Sampler],
        pool: PooledContext | None,
        prove_residency: Callable[[], None],
        kv_unified: bool,
        scored_rows: int,
        takes_snapshots: bool,
        black_box: BlackBox,
    ) -> None:
        """`scored_rows` limits a prompt's rows in one batch if its log-probabilities are wanted.
        With `takes_snapshots`, a prompt can continue only from the place of a snapshot."""
        self._loop, self._prompts, self._send = loop, prompts, send
        self._make_sampler = make_sampler
        self._prove_residency, self._kv_unified = prove_residency, kv_unified
        self._scored_rows, self._takes_snapshots = scored_rows, takes_snapshots
        self._in_hand = black_box.in_hand
        self._pooling: Pooling | None = None
        if pool is not None:
            self._pooling = Pooling(
                loop.call, pool, send, loop.stats, self._in_hand, loop.count_step
            )
        self._lock = threading.Lock()
        self._preparing: set[int] = set()
        """Requests that are not with the loop yet and have not ended; guarded by the lock."""
        self._small: queue.SimpleQueue[tuple[int, Work]] = queue.SimpleQueue()
        self._long: queue.SimpleQueue[tuple[int, Work]] = queue.SimpleQueue()
        for name, lane, place in (
            ("intake-small", self._small, SMALL_INTAKE),
            ("intake-long", self._long, LONG_INTAKE),
        ):
            args = (lane, place)
            threading.Thread(target=self._prepare_all, args=args, name=name, daemon=True).start()

    def handle(self, command: Command) -> None:
        """Sort a command, without waiting for any work."""
        match command:
            case Submit(request_id, work):
                with self._lock:
                    self._preparing.add(request_id)
                try:
                    is_long = isinstance(work, ProveResidency) or size_of(work) > LONG_WORK
                except RecursionError:
                    is_long = True
                (self._long if is_long else self._small).put((request_id, work))
            case Cancel(request_id):
                self._cancel(request_id)
            case EndReasoning(request_id):
                with self._lock:  # after a request that is being handed over
                    self._loop.end_reasoning(request_id)
            case _:
                raise AssertionError(f"{type(command).__name__} is not for a running engine")

    def _cancel(self, request_id: int) -> None:
        with self._lock:
            if request_id in self._preparing:
                self._preparing.remove(request_id)
                self._send([Failed(request_id, Cancelled("the request was cancelled"))])
            else:
                (self._pooling or self._loop).cancel(request_id)

    # --- the threads that prepare ----------------------------------------------------------

    def _prepare_all(self, lane: queue.SimpleQueue[tuple[int, Work]], place: int) -> None:
        """Prepare requests one after the other. `place` is this thread's index in the black box."""
        while True:
            self._in_hand[place] = 0
            request_id, work = lane.get()
            self._in_hand[place] = request_id
            try:
                if request_id in self._preparing:  # it may have been cancelled while it waited
                    self._prepare(request_id, work)
            except WorkerError as error:
                self._end(Failed(request_id, error))
            except Gone:  # the next engine starts the program again
                log.exception("engine.intake_failed")
                os._exit(70)
            except Exception:
                log.exception("engine.request_failed")
                fault = InferenceFailed("an unexpected error occurred while preparing the request")
                self._end(Failed(request_id, fault))

    def _prepare(self, request_id: int, work: Work) -> None:
        match work:
            case InferenceRequest():
                sequence = self._sequence(request_id, work)
                submit = partial(self._loop.submit, sequence)
                self._hand_over(request_id, sequence.n_prompt, sequence.prompt_ids, submit)
            case Embed(inputs, norm, field=field):
                texts = (self._prompts.embedded(text, at) for at, text in placed(field, inputs))
                self._pool(request_id, work, texts, norm)
            case Rank(query, documents, field=field):
                items = placed(field, documents)
                texts = (self._prompts.pair(query, text, at) for at, text in items)
                self._pool(request_id, work, texts, UNSCALED)
            case Tokenize():
                self._end(Answered(request_id, self._prompts.tokenized(work)))
            case Detokenize(tokens):
                self._end(Answered(request_id, self._prompts.detokenize(tokens)))
            case CountPrompt(prompt):
                n_tokens = self._prompts.count(prompt, partial(self._check_wanted, request_id))
                self._end(Answered(request_id, n_tokens))
            case ApplyTemplate(prompt):
                self._end(Answered(request_id, self._prompts.render(prompt)))
            case ProveResidency():
                self._prove_residency()
                self._end(Answered(request_id, None))

    def _check_wanted(self, request_id: int) -> None:
        """Report that the preparation of a request makes progress.

        Raises:
            Cancelled: the request was cancelled; its end was already sent.
        """
        with self._lock:  # nothing follows a request's end
            if request_id not in self._preparing:
                raise Cancelled("the request was cancelled")
            self._send([Preparing(request_id)])

    def _end(self, event: Answered | Failed) -> None:
        """Send the end of a request that the loop does not have, unless it was cancelled."""
        with self._lock:
            if event.request_id in self._preparing:
                self._send([event])
                self._preparing.remove(event.request_id)

    def _sequence(self, request_id: int, request: InferenceRequest) -> Sequence:
        if self._pooling is not None:
            why = "this model computes embeddings or ranks documents, and generates no text"
            raise InvalidRequest.of_field("model", why)
        if request.deterministic and self._kv_unified:
            raise InvalidRequest.of_field(
                "deterministic",
                "not available with a unified KV cache, where other requests' cells change the "
                "order of the sums; start the worker with --no-kv-unified",
            )
        check_wanted = partial(self._check_wanted, request_id)
        prompt = self._prompts.read(request.prompt, check_wanted, request.cache_salt, request.field)
        tokens = prompt.ids
        if prompt.spans and request.prompt_logprobs is not None:
            why = "pictures and sounds have no tokens, and thus no log-probabilities"
            raise InvalidRequest.of_field("prompt_logprobs", why)
        texts = [token for token in tokens if token >= 0] if prompt.spans else tokens
        sampler = self._make_sampler(request.sampling, texts)
        sampler.follow_produced(request.produced, request.learned)
        n_system = 0
        if self._takes_snapshots:
            n_system = self._prompts.system_tokens(request.prompt, tokens)
        return Sequence(
            request_id,
            request,
            tokens,
            sampler,
            max_rows=NO_LIMIT if request.prompt_logprobs is None else self._scored_rows,
            n_system=n_system,
            prompt_end=self._prompts.detokenize(tuple(texts[-PROMPT_END_TOKENS:])),
            spans=tuple(prompt.spans),
        )

    def _hand_over(
        self, request_id: int, n_tokens: int, ids: bytes, submit: Callable[[], None]
    ) -> None:
        """Give a request to the loop, unless it has been cancelled.

        `Accepted` is sent first, because the loop may send `Started` at once. The lock is held, so
        that a cancel finds the request either here or in the loop.
        """
        with self._lock:
            if request_id in self._preparing:
                self._send([Accepted(request_id, n_tokens, ids)])
                submit()
                self._preparing.remove(request_id)

    def _pool(
        self, request_id: int, work: Embed | Rank, texts: Iterable[list[int]], norm: int
    ) -> None:
        """Tokenise the texts and give them to the engine thread."""
        pooling = self._pooling
        assert pooling is not None, "the API process refuses it"
        tokens = list(texts)
        n_tokens = sum(map(len, tokens))
        if (n_bytes := n_tokens * pooling.token_bytes) > MOST_OUTPUT_BYTES:
            raise InvalidRequest.of_field(
                work.field,
                f"embeddings of {n_tokens:,} tokens have {n_bytes:,} bytes, more than "
                f"{MOST_OUTPUT_BYTES:,}; send fewer texts at once",
            )
        take = partial(pooling.take, request_id, tokens, norm, work.adapters)
        self._hand_over(request_id, n_tokens, b"", take)


def size_of(work: Any) -> int:
    """The approximate number of characters or token ids in a request."""
    match work:
        case str():
            return len(work)
        case bytes():  # of a medium, which takes far longer to decode than to send
            return LONG_WORK + 1
        case tuple() if work and isinstance(work[0], int):
            return len(work) + sum(len(part) for part in work if isinstance(part, str))
        case list() | tuple():
            return sum(map(size_of, work))
        case Mapping():
            return sum(map(size_of, work.keys())) + sum(map(size_of, work.values()))
        case Rank(query, documents):  # the query is computed with each document
            return len(query) * len(documents) + size_of(documents)
    if isinstance(work, Struct):
        return sum(map(size_of, astuple(work)))
    return 1
