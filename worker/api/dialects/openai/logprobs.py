"""Log-probabilities in the forms of OpenAI and vLLM. Pure functions, any thread."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from worker.api.chat.scored import finite, piece_text, scored_tokens
from worker.wire.messages import TokenLogprob


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": scored_tokens(entries), "refusal": None}


Part = tuple[str, Sequence[TokenLogprob]]
"""Of a plain completion's text, with the tokens that came with it."""


class Offsets:
    """Where the tokens of a text begin in it, in characters, as its parts come. Of tokens that a
    stop held back, the text comes with a later part; a token that is not shown has none."""

    def __init__(self) -> None:
        self.n_chars = 0
        """Of the text so far."""
        self._ahead = ""
        """The tokens' text that is still to come."""
        self._n_before = 0
        """The characters of the tokens so far; one counts once all its bytes have come."""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, part: Part) -> Iterator[int]:
        """The offsets of a part's tokens."""
        text, entries = part
        n_taken = min(len(text), len(self._ahead))
        if text[:n_taken] != self._ahead[:n_taken]:
            n_taken, self._ahead = 0, ""
            self._characters.reset()
        if not self._ahead:
            self._n_before = self.n_chars
        self._ahead = self._ahead[n_taken:]
        self.n_chars += len(text)
        for entry in entries:
            yield max(self._n_before, 0)
            before = self._characters.getstate()
            said = self._characters.decode(entry.piece)
            n_shown = min(len(said), len(text) - n_taken)
            if text.startswith(said[:n_shown], n_taken):
                n_taken += n_shown
                self._ahead += said[n_shown:]
                self._n_before += len(said)
            else:
                self._characters.setstate(before)


def prompt_part(text: str, entries: Sequence[TokenLogprob], offsets: Offsets) -> Part:
    """A prompt's text as its tokens have it, which may begin with a BOS or a space before it."""
    shown = b"".join(entry.piece for entry in entries).decode("utf-8", "replace")
    offsets.n_chars = len(text) - len(shown)
    return shown, entries


def completion_logprobs(parts: Iterable[Part], offsets: Offsets) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion, or of a chunk of it.

    The first token of a prompt has null, as in OpenAI's answers.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    begins: list[int] = []
    tops: list[dict[str, float] | None] = []
    for part in parts:
        begins += offsets.of(part)
        for entry in part[1]:
            tokens.append(piece_text(entry.piece))
            is_first = math.isnan(entry.logprob)
            logprobs.append(None if is_first else finite(entry.logprob))
            top = {piece_text(each.piece): finite(each.logprob) for each in entry.top}
            tops.append(None if is_first else top)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": begins,
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
