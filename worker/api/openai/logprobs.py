"""Log-probabilities in OpenAI's two forms. A piece may be part of a character, so its exact bytes
travel beside its text. Pure functions, any thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.wire.messages import TokenLogprob

# JSON has no infinity; OpenAI writes this for a token that cannot be drawn.
_LOWEST = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = [
        {
            **_entry(entry.piece, entry.logprob),
            "top_logprobs": [_entry(piece, logprob) for _, piece, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion; offsets count characters of its text."""
    tokens, logprobs, offsets, tops = [], [], [], []
    taken = b""
    for entry in entries:
        tokens.append(_text(entry.piece))
        logprobs.append(_finite(entry.logprob))
        offsets.append(text_offset + len(taken.decode("utf-8", "ignore")))
        tops.append({_text(piece): _finite(logprob) for _, piece, logprob in entry.top})
        taken += entry.piece
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST
