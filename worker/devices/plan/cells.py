"""The number of KV cells, how sequences share them, and the options of the context.

The plan uses it before the load, and the engine during the load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from worker.llama.context import ContextOptions
from worker.wire.engine_settings import EngineSettings

POOLED_AT_ONCE = 32
"""The most texts in one decode of a model that pools."""
LARGEST_SHARE = 4
"""The KV of a sequence is stored only if the store's limit is at least this many times as large."""
CELLS_STEP = 256
"""llama.cpp rounds context lengths up to multiples of this."""
MOST_BACK = 7
"""The most guesses that can be taken back from a recurrent state, if a kind of guesses is chosen:
each takes the memory of one more state per slot."""
STATES_AHEAD = 64
"""Hidden states that are kept beside those of a micro-batch: of the last tokens and of guesses."""
_SHORTEST_PART = 512
"""The least cells in a part of a pool; most conversations would soon outgrow shorter ones."""
STATES_AT_ONCE = 2
"""Stored sequences that are in memory at once: one being written, one being read."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The number of cells and how sequences share them."""

    cells: int
    """Cells of all sequences together."""
    context_length: int
    """The most tokens of one sequence."""
    unified: bool = False
    """Whether all sequences share one pool; otherwise, each has an equal part."""
    reason: str = ""
    divisions: tuple[int, ...] = ()
    """The numbers of equal parts into which one pool is divided while every sequence fits into a
    part, the best first: attention then goes over a sequence's own part alone."""


def context_options(
    settings: EngineSettings, kv: KvCache, *, threads: int, embeds: bool, slots: int | None = None
) -> ContextOptions:
    """The options of the context, the same for the plan and the engine.

    A pooled text is computed in one batch, because attention looks both ways. Several texts share a
    decode and the cells of one text.

    NOTE: llama.cpp ends the process in two cases. One is a batch of pooled texts whose rows, cut to
    the number of cells, do not divide evenly among the texts: so the rows are a multiple of the
    texts, and there are as many cells. The other is a graph of no more rows than a sequence has
    recurrent states.
    """
    can_guess = not embeds and settings.speculate not in ("auto", "off")
    pooled = -(-kv.context_length // POOLED_AT_ONCE) * POOLED_AT_ONCE
    return ContextOptions(
        n_ctx=pooled if embeds else kv.cells,
        n_seq_max=POOLED_AT_ONCE if embeds else slots or settings.slots,
        n_batch=pooled if embeds else settings.batch,
        n_ubatch=pooled if embeds else settings.micro_batch,
        threads=threads,
        kv_types=settings.kv_types,
        rope=settings.rope,
        kv_unified=kv.unified or embeds,
        flash_attention=settings.flash_attention,
        offload=settings.on_gpu,
        embeddings=embeds,
        n_back=max(min(MOST_BACK, settings.micro_batch - 2), 0) if can_guess else 0,
        mtp="trunk" if settings.speculate == "mtp" and not embeds else "off",
    )


def draft_options(settings: EngineSettings, context_length: int, *, threads: int) -> ContextOptions:
    """The context of a draft model: it has one sequence, whose tokens it guesses."""
    return ContextOptions(
        n_ctx=context_length,
        n_batch=settings.micro_batch,
        n_ubatch=settings.micro_batch,
        threads=threads,
        kv_types=settings.kv_types,
        flash_attention=settings.flash_attention,
        offload=settings.on_gpu,
    )


def head_options(settings: EngineSettings, context_length: int, *, threads: int) -> ContextOptions:
    """The context of the model's own layers for multi-token prediction: like a draft model's, with
    the model's rope settings."""
    options = draft_options(settings, context_length, threads=threads)
    return replace(options, rope=settings.rope, mtp="head")


def divisions_of(cells: int, slots: int) -> tuple[int, ...]:
    """The numbers of parts: one for each slot, or longer ones for half as many sequences."""
    return tuple(n for n in (slots, slots // 2) if n > 1 and cells // n >= _SHORTEST_PART)


def divided(cells: int, n_parts: int) -> KvCache:
    """A pool in `n_parts` equal parts."""
    length = cells // n_parts // CELLS_STEP * CELLS_STEP
    return KvCache(length * n_parts, length)


def a_part_each(settings: EngineSettings, context_length: int) -> KvCache:
    """Cells for `context_length` tokens in every slot."""
    cells = context_length * settings.slots
    reason = f"{settings.slots} slots × {context_length:,} tokens, each with cells of its own"
    if settings.slots == 1:
        reason = f"{cells:,} cells, as many as one sequence may have"
    elif settings.kv_unified:
        reason = f"{cells:,} cells in one pool, as --kv-unified asks"
    return KvCache(cells, context_length, bool(settings.kv_unified), reason)
