"""The types of the answers on the worker's own paths; `/openapi.json` publishes them. Pure data."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from worker.api.http.state import Refusal
from worker.supervisor.status import Activity, State
from worker.wire.backends import BackendName
from worker.wire.engine_info import ControlInfo, DeviceNames
from worker.wire.messages import StopReason

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
AnyObject = dict[str, Any]


class Health(TypedDict):
    status: Literal["healthy", "unhealthy"]
    model: str
    resident: bool
    quant_kind: str | None
    vram_bytes_used: Count
    tokenizer_kind: str | None
    vocab_size: Count | None
    context_length: Count | None
    uptime_seconds: Amount
    backend: BackendName
    device: DeviceNames | None
    last_progress_ms: Amount
    state: State
    running: Count
    queued: Count
    reason: NotRequired[str]
    residency_lost: NotRequired[str]
    cpu_variant: NotRequired[str]


class ReadyAnswer(TypedDict):
    ready: bool
    state: State | Literal["idle", "busy"]
    phase: NotRequired[str]
    percent: NotRequired[Annotated[float, Field(ge=0, le=100)]]
    residency_lost: NotRequired[str]


class ConversionAnswer(TypedDict):
    """The source of a file that llorch-convert made."""

    source: str
    revision: str | None
    source_sha256: str
    outtype: str
    version: str
    difference: str | None


class AdapterAnswer(TypedDict):
    """A LoRA adapter that is loaded."""

    name: str
    scale: float
    is_default: bool
    size_bytes: Count


class ModelAnswer(TypedDict):
    metadata_sha256: str
    conversion: ConversionAnswer | None
    adapters: list[AdapterAnswer]
    overridden: dict[str, Any]
    """Metadata that overrides the file's."""
    control: ControlInfo | None


class EngineCrash(TypedDict):
    at: str
    """Time in UTC, as in RFC 3339."""
    cause: str
    ready_seconds: Amount
    """How long that engine had been ready; 0 if it crashed during its start."""


class Info(TypedDict):
    worker_id: str
    incarnation: str
    version: str
    backend: str
    model_ref: str
    protocol: Literal["sse"]
    limits: AnyObject
    model: ModelAnswer | None
    engine: AnyObject | None
    residency: AnyObject | None
    engine_crashes: list[EngineCrash]
    """The engine's last 16 crashes, newest last."""


class MemoryPart(TypedDict):
    part: str
    bytes: Count


class Status(TypedDict):
    at: float
    """Unix time in seconds."""
    state: State
    phase: str
    """Phase of the worker's start, or of the engine's restart after a crash; then `ready`."""
    percent: Annotated[float, Field(ge=0, le=100)]
    bytes_per_second: float | None
    uptime_seconds: Amount
    slots: Count
    running: Count
    queued: Count
    queued_prompt_tokens: Count
    requests: list[Activity]
    """Requests with a slot, then the first 32 that wait."""
    kv_cells: dict[str, Count]
    """Number of cells: `used` by running requests, `cached` for reuse, and `total`."""
    memory: list[MemoryPart]
    """The planned bytes on the device by part; their sum is all that the worker uses."""
    device_bytes: Count
    """Total memory of the device."""
    prompt_tokens: dict[str, Amount]
    """Tokens of started prompts: reused from `device`, `memory` and `disk`, and `computed`."""
    tokens_out: Amount
    engine_crashes: Amount
    refusals: list[Refusal]
    """The last 16 refused requests, newest first."""


class History(TypedDict):
    """Columns, with a row for each ten seconds of the last hour."""

    at: list[float]
    tokens_per_second: list[float]
    prompt_computed_per_second: list[float]
    """Tokens of started prompts that were computed; the next three are those reused per tier."""
    prompt_device_per_second: list[float]
    prompt_memory_per_second: list[float]
    prompt_disk_per_second: list[float]
    running: list[int]
    waiting: list[int]
    cells_used: list[float]
    """Percentage of all cells, as in `cells_cached`."""
    cells_cached: list[float]
    first_token_ms_p50: list[float | None]
    first_token_ms_p95: list[float | None]
    inter_token_ms_p50: list[float | None]
    inter_token_ms_p95: list[float | None]


class WholeAnswer(TypedDict):
    job_id: str
    model: str
    started_at: str
    seed: Count
    prompt_tokens: Count
    cached_tokens: Count
    text: str
    tokens: list[Count]
    tokens_out: Count
    decode_time_ms: Amount
    stop_reason: StopReason
    stop_sequence_matched: NotRequired[str]
    engine_restarts: NotRequired[Count]


class Done(TypedDict):
    """The result of a command."""

    job_id: NotRequired[str]
    status: Literal["cancelled", "draining", "sleeping", "waking", "awake"]


class Load(TypedDict):
    server_load: Count


class Version(TypedDict):
    version: str


class Sleeping(TypedDict):
    is_sleeping: bool
