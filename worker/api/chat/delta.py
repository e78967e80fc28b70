"""What an answer grows by: the closed set of its deltas, the same for all dialects. Pure data.

A parser makes text, reasoning and calls of a model's text. The engine's own events that an answer
shows are deltas as they are: `Started` is the first of each choice, `Finished` the last.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.wire.messages import Finished, PromptProgress, PromptScored, Started, TokenLogprob


class Text(NamedTuple):
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens that came with it, reasoning and calls included, if they are wanted. The text
    may be empty then."""
    token_ids: tuple[int, ...] = ()
    """Of an answer that no parser cuts."""


class Reasoning(NamedTuple):
    text: str


class Call(NamedTuple):
    """The beginning of a call. Its arguments follow, as parts of a JSON text or of that which a
    custom tool takes."""

    call: int
    """Its index in the message."""
    id: str
    name: str
    is_custom: bool = False
    """Whether it is of a custom tool."""


class Arguments(NamedTuple):
    call: int
    """The index of the call that they belong to."""
    text: str
    """May be empty."""


Delta = Started | PromptProgress | PromptScored | Text | Reasoning | Call | Arguments | Finished
