"""Tokens that separate the parts of a text: around a gap, or between a query and a document.

Any thread.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from worker.llama import library


class InfillTokens(NamedTuple):
    """The marks of a text with a gap."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


def infill_tokens(vocabulary: Any) -> InfillTokens | None:
    """The vocabulary's marks of a gap; `None` unless it has all that are needed."""
    flat = library.load()
    prefix = flat.llama_vocab_fim_pre(vocabulary)
    suffix = flat.llama_vocab_fim_suf(vocabulary)
    middle = flat.llama_vocab_fim_mid(vocabulary)
    if min(prefix, suffix, middle) < 0:
        return None
    others = flat.llama_vocab_fim_rep(vocabulary), flat.llama_vocab_fim_sep(vocabulary)
    repository, file = (token if token >= 0 else None for token in others)
    return InfillTokens(prefix, suffix, middle, repository, file)


def pair_ends(vocabulary: Any) -> list[int]:
    """Tokens between the two texts of a ranked pair; the first one also ends the second text."""
    flat = library.load()
    eos, sep = int(flat.llama_vocab_eos(vocabulary)), int(flat.llama_vocab_sep(vocabulary))
    ends = [eos if eos >= 0 else sep] if flat.llama_vocab_get_add_eos(vocabulary) else []
    return [*ends, sep] if flat.llama_vocab_get_add_sep(vocabulary) else ends
