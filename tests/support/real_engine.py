"""The engine's loop on llama.cpp and a small model, driven step by step in this process."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from tests.support import books
from tests.support.bundled import bundled_gguf
from tests.support.driven import Driven, opened
from worker.devices.plan.cells import divided
from worker.engine.cache.disk import Disk
from worker.engine.limits import Limits
from worker.engine.loop import Loop
from worker.engine.model_runner import ModelRunner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation.mtp import Head
from worker.engine.speculation.speculation import Drafter
from worker.engine.text.prompt import PromptBuilder
from worker.llama.constraint import GrammarVocabulary
from worker.llama.context import Context, ContextOptions
from worker.llama.model import LoadOptions, Model
from worker.llama.sampler import Sampler
from worker.models.checksum import sha256_of_file
from worker.wire.adapters import Applied
from worker.wire.messages import (
    Finished,
    Token,
    TokenLogprob,
)
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest

CONTEXT = 512


class RealEngine(Driven):
    """The bundled model, or the one at `path`, with `n_cells` for all slots, or `CONTEXT` for
    each."""

    running: ClassVar[set[RealEngine]] = set()

    def __init__(
        self,
        slots: int = 4,
        *,
        path: Path | None = None,
        kv_unified: bool = False,
        divisions: tuple[int, ...] = (),
        n_cells: int | None = None,
        flash_attention: Literal["auto", "on", "off"] = "auto",
        store: Path | None = None,
        binding: str = "of this model and layout",
        drafter: Drafter | None = None,
        batch: int = 2048,
        n_back: int = 0,
        mtp: bool = False,
        adapters: tuple[Path, ...] = (),
        **limits: Any,
    ) -> None:
        super().__init__()
        self.model = Model(str(path or bundled_gguf("f32")), LoadOptions(mtp=mtp))
        for adapter in adapters:
            self.model.load_adapter(str(adapter))
        n_cells = n_cells or CONTEXT * slots
        options = ContextOptions(
            n_ctx=n_cells,
            n_seq_max=slots,
            n_batch=batch,
            n_ubatch=min(batch, 512),
            threads=1,
            kv_types=("f32", "f32"),
            kv_unified=kv_unified,
            flash_attention=flash_attention,
            n_back=n_back,
            mtp="trunk" if mtp else "off",
        )
        self.context = Context(self.model, options)
        self.head: Context | None = None
        if mtp:
            rows = min(batch, 64)
            alone = ContextOptions(
                CONTEXT, n_batch=rows, n_ubatch=rows, kv_types=("f32", "f32"), mtp="head"
            )
            alone = replace(alone, flash_attention=flash_attention)
            self.head = Context(self.model, alone)
            drafter = Head(self.head, self.context)
        self.runner = ModelRunner(self.model, self.context, CONTEXT)
        self.vocabulary = GrammarVocabulary(self.model)
        self.prompts = PromptBuilder(self.model, None, CONTEXT)
        settings: dict[str, Any] = dict(prefill_budget=64, memory_bytes=64 << 20, cell_bytes=2000)
        settings |= {"unified": kv_unified} | asdict(self.runner.memory_kind)
        disk = None
        if store is not None:
            disk = opened(
                Disk(
                    store,
                    64 << 20,
                    self.runner.memory_kind,
                    lambda _: (binding, [sha256_of_file(each, store) for each in adapters]),
                )
            )
        limits = {"n_slots": slots, "n_cells": n_cells, "batch": batch} | settings | limits
        pool = Limits(**limits)
        layouts = [
            replace(pool, n_slots=n, n_cells=divided(n_cells, n).cells, unified=False)
            for n in divisions
        ]
        self.scheduler = Scheduler(*layouts, pool)
        best = self.scheduler.limits
        if layouts:
            self.context.divide(best.n_cells, best.n_slots, best.unified)
        self.cache = self.scheduler.cache
        # Decisions by cost must be the same on a busy machine.
        clock = time.thread_time
        self.loop = Loop(
            self.runner, self.scheduler, self.receive, clock, disk=disk, drafter=drafter
        )
        self._next = 0
        self.running.add(self)

    def submit(
        self,
        prompt: str | tuple[int, ...],
        *,
        max_tokens: int = 32,
        stop: tuple[str, ...] = (),
        deterministic: bool = False,
        cache_salt: str | None = None,
        adapters: Applied = (),
        produced: tuple[int, ...] = (),
        learned: tuple[float, ...] = (),
        prompt_logprobs: int | None = None,
        **sampling: Any,
    ) -> int:
        self._next += 1
        request = InferenceRequest(
            job_id=str(self._next),
            prompt=prompt,
            sampling=Sampling(**({"seed": 1, "temperature": 0.0} | sampling)),
            max_tokens=max_tokens,
            stop=stop,
            deterministic=deterministic,
            cache_salt=cache_salt,
            adapters=adapters,
            produced=produced,
            prompt_logprobs=prompt_logprobs,
        )
        tokens = self.prompts.build(prompt)
        sampler = Sampler(self.model, request.sampling, tokens, self.vocabulary)
        sampler.follow_produced(produced, learned)
        sequence = Sequence(self._next, request, tokens, sampler)
        if prompt_logprobs is not None:
            sequence.max_rows = 64  # each has logits
        self.loop.submit(sequence)
        return self._next

    def check(self) -> None:
        books.check(self.cache, self.context.last_position)

    def run(self) -> None:
        """Run until nothing is left to do and everything is stored."""
        self.turn()
        while not self._is_done():
            if self.scheduler.has_work:
                self.turn()
            else:
                self.loop.turn()  # waits for the store

    def _is_done(self) -> bool:
        if self.scheduler.waiting or self.scheduler.has_work:
            return False
        traffic = self.loop.traffic
        if traffic is None:
            return True
        return not traffic.is_writing and not any(slot.is_new for slot in self.cache.slots)

    def generate(self, prompt: str | tuple[int, ...], **options: Any) -> str:
        request_id = self.submit(prompt, **options)
        self.run()
        return self.text(request_id)

    def tokens_of(self, text: str) -> list[int]:
        return self.model.tokenize(text, add_special=False, parse_special=True)

    def logprobs(self, request_id: int) -> list[TokenLogprob]:
        return [p for e in self.events[request_id] if isinstance(e, Token) for p in e.logprobs]

    def end(self, request_id: int) -> Finished:
        last = self.events[request_id][-1]
        assert isinstance(last, Finished), last
        return last

    def close(self) -> None:
        self.context.close()
        if self.head is not None:
            self.head.close()
        self.model.close()
        self.running.discard(self)


def random_tokens(dice: random.Random, count: int) -> tuple[int, ...]:
    """Random tokens that are in every vocabulary of the tests."""
    return tuple(dice.randrange(300, 1000) for _ in range(count))
