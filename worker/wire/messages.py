"""The closed set of messages between the API process and the engine process.

The API process sends single commands. The engine process sends the events of a step as one list (a
"frame"), after a frame that says what starts with that step. Every submitted request gets exactly
one `End`, always last. Messages are data whose types each end checks (`transport`). All classes are
immutable, because they cross threads and processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from worker.errors import WorkerError
from worker.wire.adapters import Adapter
from worker.wire.engine_info import EngineInfo
from worker.wire.engine_settings import EngineSettings
from worker.wire.work import Answer, Work

Count = Annotated[int, Meta(ge=0)]
StopReason = Literal["EOS", "MAX_TOKENS", "STOP_SEQUENCE"]
DecodeOutcome = Literal["ok", "no_room", "aborted", "failed"]
"""The outcome of a batch. `ok`: computed. `no_room`: too few KV cells; the cache is unchanged.
`aborted`: stopped on request; finished parts stay in the cache. `failed`: the backend failed; the
batch's rows are undefined."""

CacheTier = Literal["device", "memory", "disk"]
"""Where a reused prefix was kept: in the cells of a slot, as a state in the host's memory, or in a
file of the KV store."""


class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Encoded as an array: the name of the class, then the fields."""


# --- commands: API process → engine process ----------------------------------------------


class DraftFile(Struct, frozen=True):
    """The draft model, and the reference by which the user named it."""

    path: str
    model_ref: str


class ProjectorFile(Struct, frozen=True):
    """What turns pictures and sounds into the model's embeddings."""

    path: str
    is_named: bool
    """Whether the user named it. A fault of one that was found automatically stops no start."""


class LoadModel(Message, frozen=True):
    """The first command: everything that the engine process needs to load and serve one model."""

    engine: EngineSettings
    model_path: str
    model_ref: str
    worker_id: str
    log_level: str = "info"
    log_format: Literal["auto", "json", "console"] = "json"
    adapters: tuple[Adapter, ...] = ()
    header: bytes | None = None
    """The model's `GgufHeader`, packed, if the API process has read it: that takes 0.1 s for a
    large one."""
    draft: DraftFile | None = None
    projector: ProjectorFile | None = None
    driver_cache: str | None = None
    """A folder in which a GPU's driver caches what it compiles."""

    @property
    def paths(self) -> list[Path]:
        """The paths of all models to load; of a split one, the first part's."""
        beside = (*self.adapters, self.draft, self.projector)
        return [Path(self.model_path), *(Path(each.path) for each in beside if each is not None)]


class Submit(Message, frozen=True):
    request_id: int
    work: Work


class Cancel(Message, frozen=True):
    """Drop the request at the next step; ignored if it has ended or is unknown."""

    request_id: int


class EndReasoning(Message, frozen=True):
    """Close the request's reasoning at its next token, as if its budget were spent."""

    request_id: int


class Stop(Message, frozen=True):
    """Exit the process now; the parent has already drained."""


Command = LoadModel | Submit | Cancel | EndReasoning | Stop


# --- events: engine process → API process ------------------------------------------------


class Progress(Message, frozen=True):
    """A phase of the start: `preflight`, `load`, `residency`, `draft` and `projector` if there are
    any, and `warmup`."""

    phase: str
    percent: float
    bytes_per_second: float | None = None
    total_bytes: int | None = None
    """What is read or received in this phase, of which `percent` is done."""


OnProgress = Callable[[Progress], None]


class Ready(Message, frozen=True):
    info: EngineInfo


class Threads(Message, frozen=True):
    """The CPUs available to the engine have changed: the new number of threads, and the reason."""

    threads: Count
    derivation: str


class EngineFailed(Message, frozen=True):
    """The engine cannot serve this model, or cannot go on; its process ends after this event."""

    error: WorkerError


class Preparing(Message, frozen=True):
    """A request that is not accepted yet makes progress: the next of its pictures and sounds is
    prepared. Many of them can take minutes."""

    request_id: int


class Accepted(Message, frozen=True):
    """A request to generate or pool has been checked, tokenised and queued."""

    request_id: int
    prompt_tokens: Count
    """Including BOS and the template's tokens."""
    prompt_ids: bytes = b""
    """The prompt's tokens as 32-bit integers, for the next engine if this one dies."""


class Started(Message, frozen=True):
    """The sequence has a slot, and its first step comes next. `cached_tokens` of its prompt are
    reused."""

    request_id: int
    cached_tokens: Count
    prompt_end: str = ""
    """The prompt's last characters, which show whether the template has opened reasoning."""
    tier: CacheTier = "device"
    """Where the reused tokens were."""
    at: float = 0.0
    """Time of the start on the monotonic clock, which all processes share. If every core computes,
    this event arrives only with the step's results. 0: the time of arrival."""


class PromptProgress(Message, frozen=True):
    """`n_computed` tokens of a prompt, including reused ones, are in the cells `seconds` after its
    start."""

    request_id: int
    n_computed: Count
    seconds: float


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    token_id: int
    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """Alternatives, best first, themselves without alternatives. They are Structs without `gc`
    because a prompt can have a hundred thousand, all of which the collector would traverse."""
    begin: int = 0
    """Where the token's text begins in the answer, in characters."""


class Token(Message, frozen=True, gc=False):
    """Text in whole characters with the ids of the tokens that begin in it. Either may be empty: of
    text that was held back, and of what an engine repeats after a crash."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    learned: tuple[float, ...] = ()
    """The state of a sampler that learns, after these tokens, for the next engine if this one
    dies."""
    begins: tuple[int, ...] = ()
    """Where each token begins, in characters from the text's start; empty if all begin there."""


class PromptScored(Message, frozen=True):
    """Log-probabilities of a prompt's tokens. The first token's is NaN, since nothing precedes it.

    Those of a long prompt come in parts, each in its own frame, since decoding a frame blocks
    everything else.
    """

    request_id: int
    logprobs: tuple[TokenLogprob, ...]
    n_left: Count = 0
    """The number of tokens whose log-probabilities are still to come."""


class Finished(Message, frozen=True):
    """The end of a generation. `tokens_out` counts all tokens drawn, including those of a matched
    stop and the end-of-generation token."""

    request_id: int
    stop_reason: StopReason
    tokens_out: Count
    decode_time_ms: float
    """Milliseconds from the first token to the end."""
    stop_sequence: str | None = None
    prompt_time_ms: float = 0.0
    """Milliseconds from getting a slot to the first token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the tokens after the last `Token`; the end-of-generation token's only if
    the request has `scores_end`."""
    token_ids: tuple[int, ...] = ()
    """The tokens after the last `Token`, including the end-of-generation token and those whose text
    a stop has removed."""


class Answered(Message, frozen=True):
    """The result of work that generates no text; its class in `work` says what it is."""

    request_id: int
    value: Answer


class Failed(Message, frozen=True):
    """The request ended with an error; before `Accepted`, this is a refusal."""

    request_id: int
    error: WorkerError


class Stats(Message, frozen=True):
    """The engine's state: sent several times a second while it works, and once when it is idle."""

    kv_cells_used: int = 0
    kv_cells_total: int = 0
    kv_cells_cached: int = 0
    """How many of the used cells are kept only for reuse."""
    steps: int = 0
    """Since the start of this engine process."""
    decode_seconds: float = 0.0
    """Seconds inside `llama_decode` since the start."""
    overhead_seconds: float = 0.0
    """Seconds of the steps outside native decoding and sampling."""
    sample_seconds: float = 0.0
    tokens_drafted: int = 0
    """Tokens that speculation guessed and computed."""
    tokens_accepted: int = 0
    """How many of those were right."""
    media_encoded: int = 0
    """Chunks of pictures and sounds that the projector has encoded."""
    encode_seconds: float = 0.0
    """Seconds inside the projector since the start."""
    preempted: tuple[int, ...] = ()
    """Requests that have lost their slots to others after their start, and wait for new ones."""


End = Finished | Answered | Failed
"""Each submitted request gets exactly one of these, always last."""
RequestEvent = Preparing | Accepted | Started | PromptProgress | PromptScored | Token | End
Event = Progress | Ready | Threads | EngineFailed | Stats | RequestEvent
