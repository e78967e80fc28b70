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
"""llama.cpp's placeholder for a medium in a text."""


class Medium(Struct, frozen=True):
    """A picture or sound as the client sent it, not decoded."""

    kind: Literal["image", "audio"]
    data: bytes
    field: str
    """The request's field that it comes from, for errors."""

    def __repr__(self) -> str:
        """With a hash in place of its many bytes, which Python computes only once."""
        n_bytes, name = len(self.data), hash(self.data)
        return f"{type(self).__name__}({self.kind!r}, {n_bytes} bytes {name:x}, {self.field!r})"


class ChatPrompt(Struct, frozen=True, tag=True):
    """Messages for the model's own chat template, rendered in the engine process."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the prompt ends with the last message's text, so that the answer continues it."""
    reasoning_marks: tuple[str, str] | None = None
    """Marks around reasoning, if the answer continues the last message's reasoning."""
    template_kwargs: Mapping[str, Any] | None = None
    media: tuple[Medium, ...] = ()
    """In the order of the parts of type `image` and `audio` in the messages' contents."""
    field: str = "messages"
    """The request's field that has the messages, for errors."""


class InfillPrompt(Struct, frozen=True, tag=True):
    """A text with a gap for the answer, marked with the model's own tokens."""

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    """Name and text of other files of the project, which precede the prefix."""
    fields: tuple[str, str, str] = ("prompt", "suffix", "")
    """The request's fields for prefix, suffix and files, for errors."""

    @property
    def field(self) -> str:
        """The field of the longest part."""
        sizes = len(self.prefix), len(self.suffix), sum(len(text) for _, text in self.files)
        return self.fields[sizes.index(max(sizes))]


class MarkedPrompt(Struct, frozen=True, tag=True):
    """Raw text with a `MEDIA_MARKER` for each medium."""

    text: str
    media: tuple[Medium, ...]
    field: str = "prompt"
    """The request's field that has the text, for errors."""


MixedTokens = tuple[int | str, ...]
"""Token ids and texts, in any order."""
Prompt = str | MixedTokens | ChatPrompt | InfillPrompt | MarkedPrompt


class LineLimits(Struct, frozen=True):
    """Limits at which the end of a line ends an answer, as in llama-server."""

    n_indent: int = 0
    """A line after the first that is indented by fewer blanks ends the answer; its blanks stay."""
    after_ms: int = 0
    """Time after the answer's first text from which on a line's end ends the answer; 0: never."""
    began: float | None = None
    """When an earlier engine sent that text, in seconds of `time.monotonic()`."""


class InferenceRequest(Struct, frozen=True, tag=True):
    """One checked job. Nothing after this object sees a request body.

    `prompt` is raw text (special tokens in it are recognised, and BOS is added once if the model
    wants it), token ids (used unchanged) mixed with texts, a chat, or a text with a gap or media.
    """

    job_id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    """0 computes the prompt and generates nothing."""
    stop: tuple[str, ...] = ()
    lines: LineLimits = LineLimits()
    prompt_logprobs: int | None = None
    """Alternatives for each token of the prompt; `None`: no log-probabilities. With them, the whole
    prompt is computed, even if a part of it is cached."""
    scores_end: bool = False
    """Whether requested log-probabilities include that of the token that ends the answer."""
    shown_tokens: tuple[str, ...] = ()
    """Spellings of control tokens to show in the answer's text, if the model has them."""
    reports_progress: bool = False
    """Whether the last step of the prompt is also followed by a `PromptProgress`."""
    cache_salt: str | None = None
    adapters: Applied = ()
    deterministic: bool = False
    produced: tuple[int, ...] = ()
    """Tokens that earlier engines sent; the answer continues after them."""
    sent_chars: int = 0
    """How much of the answer's text they sent. It may end after the text that `produced` releases,
    because a later token showed that no stop begins there."""
    learned: tuple[float, ...] = ()
    """The state of the sampler after `produced`."""
    field: str = "prompt"
    """The client's field for a prompt of text or ids, for errors; other prompts have their own."""
    deadline: float | None = None
    """A time in seconds of `time.monotonic()`, which both processes share."""

    @property
    def scope(self) -> Scope:
        """The scope of the cells that it can continue from."""
        return Scope(self.cache_salt, self.adapters)


class Tokenize(Struct, frozen=True, tag=True):
    """Tokenize a text. The answer is a `Tokenized`."""

    text: str | MixedTokens
    add_special: bool = False
    parse_special: bool = True
    """Whether special tokens are recognised in the text."""
    with_pieces: bool = False


class Tokenized(Struct, frozen=True, tag=True):
    """Tokens as three buffers, so that even millions of them delay neither process."""

    ids: bytes
    """32-bit integers."""
    sizes: bytes = b""
    """The length of each piece in bytes, as 32-bit integers; empty without pieces."""
    pieces: bytes = b""
    """The tokens' bytes, concatenated; for a control token, its spelling."""


class Detokenize(Struct, frozen=True, tag=True):
    """Detokenize ids, including special tokens; texts among them stay. The answer is a string."""

    tokens: MixedTokens


class CountPrompt(Struct, frozen=True, tag=True):
    """Count the tokens of a chat rendered with the model's template, without a limit. The answer is
    the number."""

    prompt: ChatPrompt


class ApplyTemplate(Struct, frozen=True, tag=True):
    """Render a chat with the model's own template. The answer is a string."""

    prompt: ChatPrompt


class Embed(Struct, frozen=True, tag=True):
    """Embed texts or tokens. The answer is a list of (tokens, 32-bit floats), in order."""

    inputs: tuple[str | MixedTokens, ...]
    norm: int = 2
    """The p of the p-norm by which vectors are divided. 0 scales the largest absolute value to
    32,760; -1 leaves vectors unchanged."""
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
    """The request's field that the documents come from, for errors."""


def placed(field: str, items: Sequence[_T]) -> Iterator[tuple[str, _T]]:
    """Pairs of a place in the request and the field's item there; a single item has no index."""
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
"""The values that answer all other work; each class says which."""
