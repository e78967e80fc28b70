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
class InferenceRequest:
    """One job, validated. Nothing behind it sees a request body.

    `prompt` is raw text (special tokens in it are recognised, BOS added once where the model
    wants it), token ids (used as they are) or a chat.
    """

    job_id: str
    prompt: str | tuple[int, ...] | ChatPrompt
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...] = ()
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
    """Text to token ids. The answer is a list of ids."""

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
    """Embeddings of texts or token lists. The answer is a list of (tokens, vector), in order."""

    inputs: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ProveResidency:
    """A fresh residency proof from live device queries. The answer is a `Residency`."""


Work = InferenceRequest | Tokenize | Detokenize | ApplyTemplate | Embed | ProveResidency
"""Everything that a request can ask of the engine. The first is answered by a stream of tokens,
the others by one value."""
