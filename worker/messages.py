"""What crosses the pipe between the API process and the engine process: a closed set.

Commands go down one by one; events come up as one list ("frame") per engine step. Every
submitted request gets exactly one of `Accepted` / `Rejected`, and every accepted one exactly one
of `Finished` / `Failed`, always last. All classes are immutable: they cross threads and processes.
Those of every step are named tuples, which pickle several times faster than dataclasses do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from worker.errors import WorkerError

Backend = Literal["cpu", "cuda", "metal", "accelerate"]
StopReason = Literal["EOS", "MAX_TOKENS", "STOP_SEQUENCE"]
DecodeOutcome = Literal["ok", "no_room", "aborted", "failed"]
"""What became of a batch: computed · no KV cells for it, the cache is as before · stopped on
request, what was done stays in the cache · the backend failed, its rows are undefined."""


# --- requests ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Ranges are checked before this is built (`api/requests`)."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None
    """GBNF text that the answer follows."""
    logprobs: int | None = None
    """Number of alternatives reported per token; `None` is off, 0 is the chosen token alone."""
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the model's own chat template, rendered in the engine process."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    add_generation_prompt: bool = True
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
    cache_salt: str | None = None
    deterministic: bool = False
    deadline: float | None = None
    """On the `time.monotonic()` clock, in seconds; the same in both processes."""


# --- commands: API process → engine process ----------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process needs to load and serve one model on one device."""

    backend: Backend
    model_path: str
    model_ref: str
    worker_id: str
    device_index: int = 0
    context_length: int | None = None
    """Tokens a single sequence may hold; `None` is the model's own, capped to what fits."""
    slots: int = 8
    batch: int = 2048
    """Tokens in one `llama_decode` at most."""
    micro_batch: int = 512
    """Tokens in one compute graph at most."""
    prefill_budget: int = 256
    """Prompt tokens in a step while other sequences decode."""
    kv_type: Literal["f16", "q8_0", "f32"] = "f16"
    kv_unified: bool = False
    flash_attention: Literal["auto", "on", "off"] = "auto"
    threads: int | None = None
    """`None` derives them from the CPU budget."""
    mmap: bool | None = None
    """`None`: on for CPU backends, off for GPU backends."""
    mlock: bool = False
    blas: bool = False
    prefix_cache: bool = True
    memory_margin_bytes: int = 0
    rpc_endpoint: str | None = None
    """`PLUG_IN@host:port` of a test device that plays the GPU; never set by a user-facing flag."""
    log_level: str = "info"
    log_format: Literal["json", "console"] = "json"


@dataclass(frozen=True, slots=True)
class Submit:
    request_id: int
    request: InferenceRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Free the request's cells at the next step; an ended or unknown one is ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Tokenize:
    call_id: int
    text: str
    add_special: bool = False


@dataclass(frozen=True, slots=True)
class Detokenize:
    call_id: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ApplyTemplate:
    call_id: int
    prompt: ChatPrompt


@dataclass(frozen=True, slots=True)
class Embed:
    """Embeddings of texts or token lists, in order; the reply is a list of (tokens, vector)."""

    call_id: int
    inputs: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ProveResidency:
    """Ask for a fresh residency proof from live device queries; the reply is a `Residency`."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the process now; the parent has already drained."""


Command = (
    EngineConfig
    | Submit
    | Cancel
    | Tokenize
    | Detokenize
    | ApplyTemplate
    | Embed
    | ProveResidency
    | Stop
)


# --- events: engine process → API process ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation as llama.cpp reports it."""

    kind: Literal["weights", "kv", "compute", "output", "recurrent"]
    device: str
    """The ggml buffer type's name: `CPU`, `CPU_Mapped`, `CUDA0`, `CUDA_Host`, `RPC0[…]`…"""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Where everything lies, read back from llama.cpp after the load."""

    resident: bool
    device: str
    """The one device that holds the model: `CPU`, `CUDA0`, `MTL0`, `RPC0`…"""
    buffers: tuple[Buffer, ...]
    layers_total: int
    layers_on_device: int
    allowed_host_buffers: tuple[str, ...] = ()
    """Host buffers that the policy allows, each with its reason in one sentence."""
    violation: str | None = None

    @property
    def device_bytes(self) -> int:
        """Of the device's own buffer types: `CUDA1` and `CUDA1_Split`, but not `CUDA10`."""
        own = re.compile(rf"{re.escape(self.device)}(?!\d)")
        return sum(b.size_bytes for b in self.buffers if own.match(b.device))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is static about the loaded model, from its GGUF metadata and from llama.cpp."""

    name: str
    architecture: str
    quant_kind: str
    """`Q4_K_M`, `Q8_0`, `BF16`…, from `general.file_type`."""
    size_bytes: int
    n_params: int
    vocab_size: int
    tokenizer_kind: str
    """`gguf-bpe`, `gguf-spm`, `gguf-wpm`, `gguf-ugm`…"""
    context_length: int
    """Tokens a single sequence may hold in this worker."""
    trained_context_length: int
    embedding_length: int
    bos_token_id: int | None
    eog_token_ids: tuple[int, ...]
    has_chat_template: bool
    template_takes_tools: bool
    pooling: str | None
    """`mean`, `cls`, `last`, `rank` for an embedding model; `None` for a generating one."""
    metadata: Mapping[str, Any]
    """GGUF metadata without its arrays (those are summarised as `[n items]`)."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Sent once per incarnation of the engine, after a token has really been decoded."""

    model: ModelInfo
    residency: Residency
    backend: Backend
    device: str
    slots: int
    batch: int
    micro_batch: int
    threads: int
    threads_derivation: str
    cpu_variant: str | None
    versions: Mapping[str, str]
    """`llama_cpp_python`, `llama_cpp` (commit), `ggml`, driver…"""
    build: Mapping[str, Any]
    """The wheel's stamp: backend, flags, compiler."""
    plan: Mapping[str, int]
    """Planned bytes by part: `weights`, `kv`, `compute`, `output`."""
    load_seconds: float
    pid: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A phase of the start: `preflight`, `load`, `residency`, `warmup`."""

    phase: str
    percent: float
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The engine cannot serve this model; the process exits after it."""

    error: WorkerError


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokenised, checked, queued. `prompt_tokens` counts BOS and template tokens too."""

    request_id: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    request_id: int
    error: WorkerError


@dataclass(frozen=True, slots=True)
class Started:
    """The sequence has a slot. `cached_tokens` of its prompt were not computed again."""

    request_id: int
    cached_tokens: int


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


@dataclass(frozen=True, slots=True)
class Finished:
    """`tokens_out` counts sampled tokens without the end-of-generation token."""

    request_id: int
    stop_reason: StopReason
    tokens_out: int
    decode_time_ms: float
    stop_sequence: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
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
    """Everything else of the steps, native sampling excluded."""
    sample_seconds: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call command: a value or an error."""

    call_id: int
    value: Any = None
    error: WorkerError | None = None


Event = (
    Progress
    | Ready
    | StartFailed
    | Accepted
    | Rejected
    | Started
    | Token
    | Finished
    | Failed
    | Stats
    | Reply
)
