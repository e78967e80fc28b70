"""The deltas by which an answer grows: a closed set, the same for all dialects. Pure data.

A parser splits the model's text into text, reasoning and calls. Engine events that an answer shows
are deltas, too, unchanged: `Started` is the first of each choice, `Finished` the last.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.wire.messages import Finished, PromptProgress, PromptScored, Started, TokenLogprob


class Text(NamedTuple):
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the tokens that came with it, those of reasoning and calls included, if
    the request asks for them. The text may then be empty."""
    token_ids: tuple[int, ...] = ()
    """The tokens of the text; empty if a parser splits the answer."""


class Reasoning(NamedTuple):
    text: str


class Call(NamedTuple):
    """The beginning of a call. Its `Arguments` follow: parts of a JSON object, or of a custom
    tool's text."""

    call: int
    """Its index among the message's calls."""
    id: str
    name: str
    is_custom: bool = False
    """Whether it calls a custom tool."""


class Arguments(NamedTuple):
    call: int
    """The index of the call that they belong to."""
    text: str
    """May be empty."""


Delta = Started | PromptProgress | PromptScored | Text | Reasoning | Call | Arguments | Finished
