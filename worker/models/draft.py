"""Resolves `--draft` to a local GGUF that can guess for the model: both have the same vocabulary.

Runs on the API process's event loop, and in commands; reading goes to a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.errors import ModelError
from worker.models.gguf.constants import constants
from worker.models.gguf.header import GgufHeader
from worker.models.resolve import resolve
from worker.settings import Settings
from worker.wire.messages import DraftFile, OnProgress

_MOST_UNEQUAL = 1024
"""How much longer one vocabulary may be: models of a family pad theirs differently."""


async def resolve_draft(
    settings: Settings,
    model: GgufHeader,
    on_progress: OnProgress = lambda progress: None,
    room: Callable[[], int] | None = None,
) -> DraftFile | None:
    """The local file of the draft model that the settings name; `None` if they name none.

    `room` returns the bytes of memory for both models: what the main one leaves decides which of a
    repository's quantisations is chosen.

    Raises `ModelError` if it cannot guess for the model, and what `resolve` raises.
    """
    if settings.draft is None:
        return None
    left = (lambda: max(room() - model.size_bytes, 0)) if room is not None else None
    found = await resolve(settings, settings.draft, on_progress, left)
    path = str(found.gguf_path)
    fault = await asyncio.to_thread(_fault, found.header, model)
    if fault is not None:
        raise ModelError(
            f"The draft model {path!r} cannot guess for {str(model.path)!r}: {fault}.", path=path
        )
    return DraftFile(path, found.model_ref)


def _fault(draft: GgufHeader, model: GgufHeader) -> str | None:
    """Why a model cannot guess for another; `None` if it can."""
    if draft.pooling is not None:
        return "it is an embedding model and generates no text"
    if draft.tokenizer_kind != model.tokenizer_kind:
        return f"its tokenizer is {draft.tokenizer_kind}, the model's is {model.tokenizer_kind}"
    key = constants().Keys.Tokenizer.LIST
    lists = [header.arrays[key] for header in (draft, model)]
    n_unequal = abs(lists[0].length - lists[1].length)
    if n_unequal > _MOST_UNEQUAL:
        return f"it has {lists[0].length:,} tokens, the model has {lists[1].length:,}"
    own, others = (each.read_bytes() for each in lists)
    for token, (mine, theirs) in enumerate(zip(own, others, strict=False)):
        if mine != theirs:
            shown = [raw.decode("utf-8", "replace") for raw in (mine, theirs)]
            return f"its token {token} is {shown[0]!r}, the model's is {shown[1]!r}"
    return None
