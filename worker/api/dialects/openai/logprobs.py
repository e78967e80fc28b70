"""Log-probabilities in the forms of OpenAI and vLLM. Pure functions, any thread."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from worker.api.chat.scored import finite, piece_text, scored_tokens
from worker.wire.messages import TokenLogprob


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": scored_tokens(entries), "refusal": None}


def prompt_offsets(text: str, entries: Sequence[TokenLogprob]) -> list[int]:
    """The offset of each prompt token in the text, in characters. A BOS or space that precedes the
    text has offset 0. A character of several tokens belongs to the one with its last byte."""
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(characters.decode(entry.piece)) for entry in entries]
    lengths.append(len(characters.decode(b"", final=True)))
    first = len(text) - sum(lengths)
    return [max(begin, 0) for begin in accumulate(lengths[:-1], initial=first)][:-1]


def completion_logprobs(entries: Sequence[TokenLogprob], offsets: list[int]) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion, or of a chunk of it.

    The first token of a prompt has null, as in OpenAI's answers.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        tokens.append(piece_text(entry.piece))
        is_first = math.isnan(entry.logprob)
        logprobs.append(None if is_first else finite(entry.logprob))
        top = {piece_text(each.piece): finite(each.logprob) for each in entry.top}
        tops.append(None if is_first else top)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(entries: Sequence[TokenLogprob]) -> Iterator[dict[str, Any] | None]:
    """vLLM's form: for each token of the prompt, its score and its alternatives' by token id."""
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
