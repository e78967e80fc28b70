"""The work that a request asks of the engine: a closed set of frozen, checked values.

Built by the API process, sent in `messages.Submit`, read by the engine process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from msgspec import Struct

from worker.wire.adapters import Applied, Scope
from worker.wire.sampling import Sampling

_T = TypeVar("_T")

MEDIA_MARKER = "<__media__>"
"""Stands for a medium in a text, as llama.cpp has it."""


class Medium(Struct, frozen=True):
    """A picture or sound as the client has sent it, not decoded."""

    kind: Literal["image", "audio"]
    data: bytes
    field: str
    """The request's field that it comes from, for errors."""

    def __repr__(self) -> str:
        """With the hash of its bytes, which are many; it is computed only once."""
        n_bytes, name = len(self.data), hash(self.data)
        return f"{type(self).__name__}({self.kind!r}, {n_bytes} bytes {name:x}, {self.field!r})"


class ChatPrompt(Struct, frozen=True, tag=True):
    """Messages for the model's own chat template, rendered in the engine process."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the text ends where the last message ends, so that the answer continues it."""
    reasoning_marks: tuple[str, str] | None = None
    """Begin and end of reasoning, if what the answer continues is the last message's reasoning."""
    template_kwargs: Mapping[str, Any] | None = None
    media: tuple[Medium, ...] = ()
    """In the order of the parts of the types `image` and `audio` in the messages' contents."""
    field: str = "messages"
    """The request's field of the messages, for errors."""


class InfillPrompt(Struct, frozen=True, tag=True):
    """A text with a gap for the answer, marked with the model's own tokens."""

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    """Other files of the same project, as name and text; they come first."""
    fields: tuple[str, str, str] = ("prompt", "suffix", "")
    """The request's fields of the two parts and of the files, for errors."""

    @property
    def field(self) -> str:
        """Of its longest part."""
        sizes = len(self.prefix), len(self.suffix), sum(len(text) for _, text in self.files)
        return self.fields[sizes.index(max(sizes))]


class MarkedPrompt(Struct, frozen=True, tag=True):
    """Raw text with a `MEDIA_MARKER` in the place of each medium."""

    text: str
    media: tuple[Medium, ...]
    field: str = "prompt"
    """The request's field of the text, for errors."""


MixedTokens = tuple[int | str, ...]
"""Token ids, and texts among them."""
Prompt = str | MixedTokens | ChatPrompt | InfillPrompt | MarkedPrompt


class LineLimits(Struct, frozen=True):
    """Where lines end an answer, as llama-server has it."""

    n_indent: int = 0
    """A line after the first that begins with fewer blanks ends it; its blanks stay."""
    after_ms: int = 0
    """The end of a line ends it so many milliseconds after its first text; 0 = never."""


class InferenceRequest(Struct, frozen=True, tag=True):
    """One checked job. Nothing after this object sees a request body.

    `prompt` is raw text (special tokens in it are recognised, and BOS is added once if the model
    wants it), token ids (used as they are) with texts among them, a chat or a text with a gap.
    """

    job_id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    """0 computes the prompt and generates nothing."""
    stop: tuple[str, ...] = ()
    lines: LineLimits = LineLimits()
    prompt_logprobs: int | None = None
    """The number of alternatives for each token of the prompt; `None` disables them. Otherwise the
    whole prompt is computed, even if a part of it is cached."""
    scores_end: bool = False
    """Whether log-probabilities, where they are wanted, have that of the token that ends it."""
    shown_tokens: tuple[str, ...] = ()
    """Control tokens that are shown in the answer's text, if the model has them."""
    reports_progress: bool = False
    """Whether the last step of the prompt, too, is followed by a `PromptProgress`."""
    cache_salt: str | None = None
    adapters: Applied = ()
    deterministic: bool = False
    produced: tuple[int, ...] = ()
    """Tokens that an earlier engine sent; the answer continues after them."""
    learned: tuple[float, ...] = ()
    """The state of its sampler after these."""
    field: str = "prompt"
    """The client's field of a prompt that is a text or ids, for errors; others have their own."""
    deadline: float | None = None
    """A time of `time.monotonic()` in seconds, which is the same in both processes."""

    @property
    def scope(self) -> Scope:
        """Whose cells it may go on from."""
        return Scope(self.cache_salt, self.adapters)


class Tokenize(Struct, frozen=True, tag=True):
    """Tokenize a text; the answer is a `Tokenized`."""

    text: str | MixedTokens
    add_special: bool = False
    parse_special: bool = True
    """Whether special tokens are recognised in the text."""
    with_pieces: bool = False


class Tokenized(Struct, frozen=True, tag=True):
    """Millions of tokens cross the pipe as three buffers, which cost neither process a step."""

    ids: bytes
    """32-bit integers."""
    sizes: bytes = b""
    """Of each token's bytes, as 32-bit integers; empty without pieces."""
    pieces: bytes = b""
    """The tokens' bytes, joined; a control token has its spelling."""


class Detokenize(Struct, frozen=True, tag=True):
    """Detokenize ids, special tokens included; texts among them stay. The answer is a string."""

    tokens: MixedTokens


class CountPrompt(Struct, frozen=True, tag=True):
    """Count the tokens of a chat as the model's template writes it, however many they are. The
    answer is the number."""

    prompt: ChatPrompt


class ApplyTemplate(Struct, frozen=True, tag=True):
    """Render a chat with the model's own template. The answer is a string."""

    prompt: ChatPrompt


class Embed(Struct, frozen=True, tag=True):
    """Embed texts or tokens. The answer is a list of (tokens, 32-bit floats), in order."""

    inputs: tuple[str | MixedTokens, ...]
    norm: int = 2
    """What a vector is divided by: its p-norm of this p; 0 makes its largest number 32,760 and -1
    leaves it as it is."""
    adapters: Applied = ()
    field: str = "input"
    """The request's field that the inputs come from, for errors."""


class Rank(Struct, frozen=True, tag=True):
    """Score how well documents answer a query. The answer is a list of (tokens, 32-bit floats), in
    order, with one float for each output of the model's classifier."""

    query: str
    documents: tuple[str, ...]
    adapters: Applied = ()
    field: str = "documents"
    """As for `Embed`."""


def placed(field: str, items: Sequence[_T]) -> Iterator[tuple[str, _T]]:
    """Each of a field's items behind its place in the request; one need not be in a list."""
    if len(items) == 1:
        return iter([(field, items[0])])
    return ((f"{field}[{index}]", item) for index, item in enumerate(items))


class ProveResidency(Struct, frozen=True, tag=True):
    """Prove residency again, from live device queries. The answer is `None`."""


Work = (
    InferenceRequest
    | Tokenize
    | Detokenize
    | CountPrompt
    | ApplyTemplate
    | Embed
    | Rank
    | ProveResidency
)
"""An `InferenceRequest` is answered by a stream of events, all others by one value."""
Answer = Tokenized | str | int | list[tuple[int, bytes]] | None
"""What the other work is answered with; each kind says with which."""
