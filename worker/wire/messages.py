"""The closed set of messages between the API process and the engine process.

The API process sends single commands. The engine process sends the events of a step as one list (a
"frame"), and before it what starts with that step. Every submitted request gets exactly one `End`,
always last. A message is data with a type that each end checks (`transport`). All classes are
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
"""The outcome of a batch. `ok`: computed. `no_room`: no KV cells for it; the cache is unchanged.
`aborted`: stopped on request; finished parts stay in the cache. `failed`: the backend failed; its
rows are undefined."""

CacheTier = Literal["device", "memory", "disk"]
"""Where a prompt's beginning is kept: in the cells of a slot, as a state in the host's memory, or
in a file of the KV store."""


class Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """On the pipe an array: the name of the class, then the fields."""


# --- commands: API process → engine process ----------------------------------------------


class DraftFile(Struct, frozen=True):
    """The draft model, and how the user calls it."""

    path: str
    model_ref: str


class ProjectorFile(Struct, frozen=True):
    """What turns pictures and sounds into the model's embeddings."""

    path: str
    is_named: bool
    """Whether the user named it: one that was found by itself stops no start."""


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
    """The model's `GgufHeader`, packed, if the API process has it: a large one takes 0.1 s to
    read."""
    draft: DraftFile | None = None
    projector: ProjectorFile | None = None
    driver_cache: str | None = None
    """A folder for what a GPU's driver compiles."""

    @property
    def paths(self) -> list[Path]:
        """Of all models that are loaded; of one in parts, the first part's."""
        beside = (*self.adapters, self.draft, self.projector)
        return [Path(self.model_path), *(Path(each.path) for each in beside if each is not None)]


class Submit(Message, frozen=True):
    request_id: int
    work: Work


class Cancel(Message, frozen=True):
    """Drop the request at the next step; one that has ended or is unknown is ignored."""

    request_id: int


class EndReasoning(Message, frozen=True):
    """Close the request's reasoning at its next token, as if its budget were spent."""

    request_id: int


class Stop(Message, frozen=True):
    """Exit the process now; the parent has already drained."""


Command = LoadModel | Submit | Cancel | EndReasoning | Stop


# --- events: engine process → API process ------------------------------------------------


class Progress(Message, frozen=True):
    """A phase of the start: `preflight`, `load`, `residency`, `warmup`; before the last one
    `draft` and `projector`, for those that there are."""

    phase: str
    percent: float
    bytes_per_second: float | None = None


OnProgress = Callable[[Progress], None]


class Ready(Message, frozen=True):
    info: EngineInfo


class Threads(Message, frozen=True):
    """The CPUs that the engine may use are others now: on how many threads it computes, and why."""

    threads: Count
    derivation: str


class EngineFailed(Message, frozen=True):
    """The engine cannot serve this model, or cannot go on; its process ends after this event."""

    error: WorkerError


class Preparing(Message, frozen=True):
    """A request that is not accepted yet moves: it comes to the next of its pictures and sounds, of
    which many may take minutes."""

    request_id: int


class Accepted(Message, frozen=True):
    """A request to generate or pool was checked, tokenised and queued."""

    request_id: int
    prompt_tokens: Count
    """BOS and the template's tokens included."""
    prompt_ids: bytes = b""
    """The prompt's tokens as 32-bit integers, for the next engine if this one dies."""


class Started(Message, frozen=True):
    """The sequence has a slot, and its first step is computed next. `cached_tokens` of its prompt
    were reused."""

    request_id: int
    cached_tokens: Count
    prompt_end: str = ""
    """The prompt's last characters tell whether the chat template has opened reasoning."""
    tier: CacheTier = "device"
    """Where the reused tokens were."""
    at: float = 0.0
    """When, by the monotonic clock, which is one for all processes: where each core computes, this
    arrives no sooner than what the step has computed. Not told: on arrival."""


class PromptProgress(Message, frozen=True):
    """So many tokens of a prompt, reused ones too, are in the cells `seconds` after its start."""

    request_id: int
    n_computed: Count
    seconds: float


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    token_id: int
    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """Alternatives, best first, without alternatives of their own. They are no tuples, which the
    collector of garbage would go through: a prompt may have a hundred thousand of them."""
    begin: int = 0
    """Where the text of an answer's token begins in the answer, in characters."""


class Token(Message, frozen=True, gc=False):
    """Whole text, valid UTF-8 and never empty, with the ids of all tokens since the last."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    learned: tuple[float, ...] = ()
    """The state of a sampler that learns, after these tokens; for the next engine if this one
    dies."""


class PromptScored(Message, frozen=True):
    """Log-probabilities of a prompt's tokens; that of the first is NaN: nothing precedes it.

    Those of a long prompt come in parts, each in a frame of its own: what decodes a frame holds up
    everything else.
    """

    request_id: int
    logprobs: tuple[TokenLogprob, ...]
    n_left: Count = 0
    """The number of tokens whose log-probabilities are still to come."""


class Finished(Message, frozen=True):
    """The end of a generation. `tokens_out` are all tokens that were drawn: with those of a matched
    stop, and with the one that ended it."""

    request_id: int
    stop_reason: StopReason
    tokens_out: Count
    decode_time_ms: float
    """Milliseconds from its first token to its end."""
    stop_sequence: str | None = None
    prompt_time_ms: float = 0.0
    """Milliseconds from its slot to its first token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log-probabilities of the tokens after the last one with text; of the end-of-generation token
    only if the request wants it (`scores_end`)."""
    token_ids: tuple[int, ...] = ()
    """The tokens after the last one with text, with the end-of-generation token, and with those of
    which a stop has left no text."""


class Answered(Message, frozen=True):
    """The value of a request that generates no text; `Work` says which."""

    request_id: int
    value: Answer


class Failed(Message, frozen=True):
    """The request ended with an error; before `Accepted`, this is a refusal."""

    request_id: int
    error: WorkerError


class Stats(Message, frozen=True):
    """The engine's state after a step: several times a second while it works, and once idle."""

    kv_cells_used: int = 0
    kv_cells_total: int = 0
    kv_cells_cached: int = 0
    """The part of the used cells that is kept only for reuse."""
    steps: int = 0
    """Since the start of this engine process."""
    decode_seconds: float = 0.0
    """Seconds inside `llama_decode` since the start."""
    overhead_seconds: float = 0.0
    """Seconds of the steps outside of native decoding and sampling."""
    sample_seconds: float = 0.0
    tokens_drafted: int = 0
    """Tokens that speculation guessed and computed."""
    tokens_accepted: int = 0
    """The part of them that was right."""
    media_encoded: int = 0
    """Parts of pictures and sounds that the projector has computed."""
    encode_seconds: float = 0.0
    """Seconds inside the projector since the start."""
    preempted: tuple[int, ...] = ()
    """The requests that have started, lost their slots to others and wait for new ones."""


End = Finished | Answered | Failed
"""What each submitted request gets exactly one of, always last."""
RequestEvent = Preparing | Accepted | Started | PromptProgress | PromptScored | Token | End
Event = Progress | Ready | Threads | EngineFailed | Stats | RequestEvent
