"""The closed set of messages between the API process and the engine process.

The API process sends single commands. The engine process sends the events of a step as one list (a
"frame"). Every submitted request gets exactly one of `Finished`, `Answered` and `Failed`, always
last. All classes are immutable, because they cross threads and processes. Those of every step are
named tuples, which pickle faster than dataclasses.
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
"""The outcome of a batch. `ok`: computed. `no_room`: no KV cells for it; the cache is unchanged.
`aborted`: stopped on request; finished parts stay in the cache. `failed`: the backend failed; its
rows are undefined."""


# --- commands: API process → engine process ----------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftFile:
    """The draft model, and how the user calls it."""

    path: str
    model_ref: str


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The first command: everything that the engine process needs to load and serve one model."""

    engine: EngineSettings
    model_path: str
    model_ref: str
    worker_id: str
    log_level: str = "info"
    log_format: Literal["auto", "json", "console"] = "json"
    adapter: Adapter | None = None
    header: object = None
    """The model's `GgufHeader`, if the API process has it: a large one takes 0.1 s to read."""
    draft: DraftFile | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: int
    work: Work


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the request at the next step; one that has ended or is unknown is ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Exit the process now; the parent has already drained."""


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
    """The engine cannot serve this model; its process exits after this event."""

    error: WorkerError


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request to generate or pool was checked, tokenised and queued."""

    request_id: int
    prompt_tokens: int
    """BOS and the template's tokens included."""
    prompt_ids: bytes = b""
    """The prompt's tokens as 32-bit integers, for the next engine if this one dies."""


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has a slot. `cached_tokens` of its prompt were reused."""

    request_id: int
    cached_tokens: int
    prompt_end: str = ""
    """The prompt's last characters tell whether the chat template has opened reasoning."""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """So many tokens of a prompt, reused ones too, are in the cells `seconds` after its start."""

    request_id: int
    n_computed: int
    seconds: float


class TokenLogprob(NamedTuple):
    token_id: int
    piece: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()
    """Alternatives, best first: (token id, piece, log-probability)."""


class Token(NamedTuple):
    """Whole text, valid UTF-8 and never empty, with the ids of all tokens since the last."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class TokenColumns(NamedTuple):
    """Tokens of many streams in columns, each of them whole text by itself. Most tokens cross the
    pipe so: as objects of their own they take several times as long to pickle."""

    request_ids: list[int]
    texts: list[str]
    token_ids: list[int]

    def rows(self) -> Iterator[Token]:
        for request_id, text, token in zip(*self, strict=True):
            yield Token(request_id, text, (token,))


class PromptScored(NamedTuple):
    """Log-probabilities of a prompt's tokens; that of the first is NaN: nothing precedes it."""

    request_id: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation. `tokens_out` excludes the end-of-generation token."""

    request_id: int
    stop_reason: StopReason
    tokens_out: int
    decode_time_ms: float
    stop_sequence: str | None = None
    prompt_time_ms: float = 0.0
    """Milliseconds from its slot to its first token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the tokens after the last one with text. If the prompt's
    log-probabilities are wanted too, the end-of-generation token is included."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The value of a request that generates no text; `Work` says which."""

    request_id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; before `Accepted`, this is a refusal."""

    request_id: int
    error: WorkerError


class Stats(NamedTuple):
    """The engine's state after a step: several times a second while it works, and once idle."""

    running: int
    waiting: int
    waiting_prompt_tokens: int
    kv_cells_used: int
    kv_cells_total: int
    kv_cells_cached: int
    """The part of the used cells that is kept only for reuse."""
    steps: int
    """Since the start of this engine process."""
    decode_seconds: float
    """Seconds inside `llama_decode` since the start."""
    overhead_seconds: float
    """Seconds of the steps outside of native decoding and sampling."""
    sample_seconds: float
    tokens_drafted: int = 0
    """Tokens that speculation guessed and computed."""
    tokens_accepted: int = 0
    """The part of them that was right."""
    kv_store_written: int = 0
    """Bytes of prefixes written to the KV store since the start."""
    kv_store_read: int = 0
    """Bytes of prefixes read from the KV store for reuse."""
    kv_store_evicted: int = 0
    """Bytes of prefixes evicted from the KV store."""


RequestEvent = (
    Accepted | Started | PromptProgress | PromptScored | Token | Finished | Answered | Failed
)
Event = Progress | Ready | StartFailed | Stats | TokenColumns | RequestEvent
