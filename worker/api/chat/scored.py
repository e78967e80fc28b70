"""Log-probabilities in JSON. Pure functions, any thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from worker.wire.messages import TokenLogprob

LOWEST = -9999.0
"""JSON has no infinity; OpenAI writes this value for a token that cannot be drawn."""


def scored_token(entry: TokenLogprob) -> dict[str, Any]:
    """A token as in OpenAI's chat completions. Its piece may be a part of a character, so its bytes
    accompany its text."""
    piece = entry.piece
    return {"token": piece_text(piece), "logprob": finite(entry.logprob), "bytes": list(piece)}


def scored_tokens(entries: Iterable[TokenLogprob]) -> Iterator[dict[str, Any]]:
    """Tokens with their alternatives, in that form."""
    for each in entries:
        yield scored_token(each) | {"top_logprobs": list(map(scored_token, each.top))}


def count_scores(entries: Sequence[TokenLogprob]) -> int:
    """How many there are, with the alternatives of each; only a prompt's first token has none."""
    return len(entries) * (1 + len(entries[-1].top)) if entries else 0


def piece_text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST
