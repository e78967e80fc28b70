"""What crosses the pipe between the API process and the engine process: a closed set.

Commands go down one by one; events come up as one list ("frame") per engine step. Every
submitted request gets exactly one of `Finished`, `Answered` and `Failed`, always last. All
classes are immutable: they cross threads and processes. Those of every step are named tuples,
which pickle several times faster than dataclasses do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from worker.errors import WorkerError
from worker.wire.engine_info import EngineInfo
from worker.wire.engine_settings import Adapter, EngineSettings
from worker.wire.work import Work

StopReason = Literal["EOS", "MAX_TOKENS", "STOP_SEQUENCE"]
DecodeOutcome = Literal["ok", "no_room", "aborted", "failed"]
"""What became of a batch: computed · no KV cells for it, the cache is as before · stopped on
request, what was done stays in the cache · the backend failed, its rows are undefined."""


# --- commands: API process → engine process ----------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftFile:
    """The draft model, and how the user calls it."""

    path: str
    model_ref: str


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The first command: everything the engine process needs to load and serve one model."""

    engine: EngineSettings
    model_path: str
    model_ref: str
    worker_id: str
    log_level: str = "info"
    log_format: Literal["auto", "json", "console"] = "json"
    adapter: Adapter | None = None
    header: object = None
    """The model's `GgufHeader`, which takes 0.1 s to read where the vocabulary is large, as far as
    the API process has it."""
    draft: DraftFile | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: int
    work: Work


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the request wherever it is, at the next step; an ended or unknown one is ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the process now; the parent has already drained."""


Command = LoadModel | Submit | Cancel | Stop


# --- events: engine process → API process ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """A phase of the start: `preflight`, `load`, `residency`, `warmup`."""

    phase: str
    percent: float
    bytes_per_second: float | None = None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine cannot serve this model; the process exits after it."""

    error: WorkerError


@dataclass(frozen=True, slots=True)
class Accepted:
    """A text to generate or to embed is tokenised, checked and queued.

    `prompt_tokens` counts BOS and template tokens too.
    """

    request_id: int
    prompt_tokens: int
    prompt_ids: bytes = b""
    """The prompt's tokens as 32-bit integers, for the next engine should this one die."""


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has a slot. `cached_tokens` of its prompt were not computed again."""

    request_id: int
    cached_tokens: int
    prompt_end: str = ""
    """The last characters of the prompt: they tell whether a chat's template has opened a block of
    reasoning."""


class TokenLogprob(NamedTuple):
    token_id: int
    piece: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()
    """Alternatives, best first: (token id, piece, log-probability)."""


class Token(NamedTuple):
    """Text that became complete, with the ids of all tokens that it took since the last event.

    `text` is valid UTF-8 and never empty.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Tokens(NamedTuple):
    """Tokens of many streams in columns, each of them whole text by itself. Most tokens cross the
    pipe so: as objects of their own they take several times as long to pickle."""

    request_ids: list[int]
    texts: list[str]
    token_ids: list[int]

    def rows(self) -> Iterator[Token]:
        for request_id, text, token in zip(*self, strict=True):
            yield Token(request_id, text, (token,))


class PromptScored(NamedTuple):
    """The log-probabilities of a prompt's tokens, once all of them are computed. That of the first
    is NaN: nothing stands before it."""

    request_id: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """`tokens_out` counts sampled tokens without the end-of-generation token."""

    request_id: int
    stop_reason: StopReason
    tokens_out: int
    decode_time_ms: float
    stop_sequence: str | None = None
    prompt_time_ms: float = 0.0
    """From its slot to its first token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of tokens without text behind the last one that had some; where the prompt's were asked for,
    the end-of-generation token is among them."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The value of a request that generates no text; `Work` says which."""

    request_id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The request's end by an error; before `Accepted` it is a refusal."""

    request_id: int
    error: WorkerError


class Stats(NamedTuple):
    """The engine after a step; sent with each step's frame and on becoming idle."""

    running: int
    waiting: int
    waiting_prompt_tokens: int
    kv_cells_used: int
    kv_cells_total: int
    kv_cells_cached: int
    """Of the used ones, those kept only for reuse."""
    steps: int
    """Since the start of this engine process."""
    decode_seconds: float
    """Time inside `llama_decode` since the start."""
    overhead_seconds: float
    """Everything else of the steps, sampling excluded."""
    sample_seconds: float
    tokens_drafted: int = 0
    """Guessed by speculation."""
    tokens_accepted: int = 0
    """Of those, guessed right."""
    kv_store_written: int = 0
    """Bytes of prefixes that were written to the KV store, since the start as all of these."""
    kv_store_read: int = 0
    """Bytes of those that were read to go on from."""
    kv_store_evicted: int = 0
    """Bytes of those that gave way to others."""


RequestEvent = Accepted | Started | PromptScored | Token | Finished | Answered | Failed
Event = Progress | Ready | StartFailed | Stats | Tokens | RequestEvent
