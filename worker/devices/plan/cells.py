"""How many KV cells there are, how sequences share them, and the context that has them.

Used before the load, by the plan, and for it, by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.llama.context import ContextOptions
from worker.wire.engine_settings import EngineSettings

POOLED_AT_ONCE = 32
"""Texts of one decode of a model that pools."""
LARGEST_SHARE = 4
"""The KV of one sequence is stored where it takes no more than this part of the store's limit."""
STATES_AT_ONCE = 2
"""Of stored sequences, in memory: one on its way out, one on its way in."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """How many cells there are and how sequences share them."""

    cells: int
    """Of all sequences together."""
    context_length: int
    """Tokens that one sequence may hold."""
    unified: bool = False
    """One pool for all sequences, or an equal part for each."""
    reason: str = ""


def context_options(
    settings: EngineSettings, kv: KvCache, *, threads: int, embeds: bool
) -> ContextOptions:
    """The one way in which a context is made, for the plan and for the engine alike.

    A text that is pooled is computed in one go, because attention looks both ways; several share a
    decode, and the cells of one text.
    """
    return ContextOptions(
        n_ctx=kv.context_length if embeds else kv.cells,
        n_seq_max=POOLED_AT_ONCE if embeds else settings.slots,
        n_batch=kv.context_length if embeds else settings.batch,
        n_ubatch=kv.context_length if embeds else settings.micro_batch,
        threads=threads,
        kv_type=settings.kv_type,
        kv_unified=kv.unified or embeds,
        flash_attention=settings.flash_attention,
        offload=settings.on_gpu,
        embeddings=embeds,
    )


def draft_options(settings: EngineSettings, context_length: int, *, threads: int) -> ContextOptions:
    """The context of a draft model: one sequence, which is guessed for."""
    return ContextOptions(
        n_ctx=context_length,
        n_batch=settings.micro_batch,
        n_ubatch=settings.micro_batch,
        threads=threads,
        kv_type=settings.kv_type,
        flash_attention=settings.flash_attention,
        offload=settings.on_gpu,
    )


def a_part_each(settings: EngineSettings, context_length: int) -> KvCache:
    """Room for `context_length` tokens in every slot."""
    cells = context_length * settings.slots
    reason = f"{settings.slots} slots × {context_length:,} tokens, a part of the cells for each"
    if settings.kv_unified:
        reason = f"{cells:,} cells in one pool, as --kv-unified asks"
    return KvCache(cells, context_length, bool(settings.kv_unified), reason)
