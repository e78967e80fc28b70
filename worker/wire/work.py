"""What a request asks of the engine: a closed set of frozen values, checked before they are built.

Built by the API process, pickled into `messages.Submit`, read by the engine process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer has to follow. With the tokens so far it says all about how to go on."""

    grammar: str
    """Lark, in llguidance's dialect."""
    field: str
    """Of the request it comes from, for errors."""
    reasoning: tuple[str, str] | None = None
    """The model's marks of a reasoning block. Where the prompt ends with the first of them, the
    constraint begins behind the second."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Ranges are checked before this is built."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None
    logprobs: int | None = None
    """Number of alternatives reported per token; `None` is off, 0 is the chosen token alone."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """Before so many no end is drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """They end an answer as the model's own ends do."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's own chat template, rendered in the engine process."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The text ends where the last message ends, so that the answer goes on with it."""
    template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """A text with a gap, which the answer fills, by the model's own tokens for it."""

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    """Others of the same project, before it: name and text."""
    fields: tuple[str, str] = ("prompt", "suffix")
    """Of the request that the two parts come from, for errors."""


Prompt = str | tuple[int, ...] | ChatPrompt | InfillPrompt


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One job, validated. Nothing behind it sees a request body.

    `prompt` is raw text (special tokens in it are recognised, BOS added once where the model
    wants it), token ids (used as they are), a chat or a text with a gap.
    """

    job_id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    """0 computes the prompt and generates nothing."""
    stop: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    """Number of alternatives reported for each token of the prompt; `None` is off. The prompt is
    then computed whole, whatever of it is cached."""
    shown_tokens: tuple[str, ...] = ()
    """Control tokens that are part of the answer's text, as far as the model has them."""
    cache_salt: str | None = None
    deterministic: bool = False
    produced: tuple[int, ...] = ()
    """Tokens that an engine before this one sent; the answer goes on behind them."""
    deadline: float | None = None
    """On the `time.monotonic()` clock, in seconds; the same in both processes."""


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Text to tokens. The answer is a list of (id, bytes), control tokens spelled out."""

    text: str
    add_special: bool = False


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Token ids to text, special tokens included. The answer is a string."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ApplyTemplate:
    """A chat rendered by the model's own template. The answer is a string."""

    prompt: ChatPrompt


@dataclass(frozen=True, slots=True)
class Embed:
    """Embeddings of texts or token lists. The answer is a list of (tokens, 32-bit floats), in
    order."""

    inputs: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """How well documents answer a query. The answer is a list of (tokens, 32-bit floats), in order:
    one float for each output of the model's classifier."""

    query: str
    documents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProveResidency:
    """A fresh residency proof from live device queries. The answer is a `Residency`."""


Work = InferenceRequest | Tokenize | Detokenize | ApplyTemplate | Embed | Rank | ProveResidency
"""Everything that a request can ask of the engine. The first is answered by a stream of tokens,
the others by one value."""
