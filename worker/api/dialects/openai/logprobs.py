"""Log-probabilities in the forms of OpenAI and vLLM. Pure functions, any thread."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from worker.api.chat.scored import finite, piece_text, scored_tokens
from worker.wire.messages import TokenLogprob


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": scored_tokens(entries), "refusal": None}


class Scored(NamedTuple):
    """A part of a plain completion's text, and its tokens."""

    offset: int
    """Of the part, in characters of the text."""
    shown: bytes
    entries: Sequence[TokenLogprob]


def scored_prompt(text: str, entries: Sequence[TokenLogprob]) -> Scored:
    """It begins before the text where a BOS or a space was added."""
    shown = b"".join(entry.piece for entry in entries)
    return Scored(len(text) - len(shown.decode("utf-8", "ignore")), shown, entries)


def completion_logprobs(parts: Iterable[Scored]) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion, or of a chunk of it; offsets count characters of
    its text, of which a token that is not shown takes none.

    The first token of a prompt has null, as in OpenAI's answers.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for offset, shown, entries in parts:
        n_taken = n_chars = 0
        # A character counts once all its bytes have come.
        characters = codecs.getincrementaldecoder("utf-8")("ignore")
        for entry in entries:
            tokens.append(piece_text(entry.piece))
            is_first = math.isnan(entry.logprob)
            logprobs.append(None if is_first else finite(entry.logprob))
            offsets.append(max(offset + n_chars, 0))
            top = {piece_text(each.piece): finite(each.logprob) for each in entry.top}
            tops.append(None if is_first else top)
            if shown.startswith(entry.piece, n_taken):
                n_taken += len(entry.piece)
                n_chars += len(characters.decode(entry.piece))
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> Iterator[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, itself and its alternatives by token id."""
    for entry in entries:
        yield None if math.isnan(entry.logprob) else _by_id(entry)


def _by_id(entry: TokenLogprob) -> dict[str, Any]:
    ranked = ((None, entry), *enumerate(entry.top, 1))
    return {
        str(each.token_id): {
            "logprob": finite(each.logprob),
            "rank": rank,
            "decoded_token": piece_text(each.piece),
        }
        for rank, each in ranked
    }
