"""The types of the answers on the worker's own paths; `/openapi.json` publishes them. Pure data."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from worker.supervisor.status import State
from worker.wire.backends import BackendName
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
    device: str | None
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
    """The LoRA adapter that the model is served with."""

    name: str
    scale: float
    size_bytes: Count


class ModelAnswer(TypedDict):
    metadata_sha256: str
    conversion: ConversionAnswer | None
    adapter: AdapterAnswer | None


class EngineCrash(TypedDict):
    at: str
    """Time in UTC, as in RFC 3339."""
    cause: str
    ready_seconds: Amount
    """How long that engine had been ready; 0 if it crashed before it was ready."""


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


class Inference(TypedDict):
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
    """What a command has done."""

    job_id: NotRequired[str]
    status: Literal["cancelled", "draining", "sleeping", "waking"]


class Sleeping(TypedDict):
    is_sleeping: bool
