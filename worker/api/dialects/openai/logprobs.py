"""Log-probabilities in the forms of OpenAI and vLLM. Pure functions, any thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from worker.api.chat.scored import finite, piece_text, scored_piece
from worker.wire.messages import TokenLogprob


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = [
        {
            **scored_piece(entry.piece, entry.logprob),
            "top_logprobs": [scored_piece(piece, logprob) for _, piece, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion; offsets count characters of its text.

    The first token of a prompt has null, as in OpenAI's answers.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    taken = b""
    for entry in entries:
        tokens.append(piece_text(entry.piece))
        is_first = math.isnan(entry.logprob)
        logprobs.append(None if is_first else finite(entry.logprob))
        offsets.append(max(text_offset + len(taken.decode("utf-8", "ignore")), 0))
        top = {piece_text(piece): finite(logprob) for _, piece, logprob in entry.top}
        tops.append(None if is_first else top)
        taken += entry.piece
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_offset(entries: Sequence[TokenLogprob], text: str) -> int:
    """The offset of a prompt's first token in its text; negative after an added BOS or space."""
    return len(text) - len(b"".join(entry.piece for entry in entries).decode("utf-8", "ignore"))


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, itself and its alternatives by token id."""
    return [None if math.isnan(entry.logprob) else _by_id(entry) for entry in entries]


def _by_id(entry: TokenLogprob) -> dict[str, Any]:
    found = {
        str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": piece_text(piece)}
        for rank, (id, piece, logprob) in enumerate(entry.top, 1)
    }
    itself = {"logprob": finite(entry.logprob), "decoded_token": piece_text(entry.piece)}
    return {str(entry.token_id): {"rank": None} | itself} | found
