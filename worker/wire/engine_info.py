"""What the engine reports when it is ready: its model, its memory and where that is placed.

Built by the engine process, sent in `messages.Ready`, read by the API process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.wire.adapters import Adapter, ControlVector
from worker.wire.backends import BackendName

_HOST_TYPE = re.compile(r"CPU(_\w+)?$|AMX$|\w+_Host$")
BufferKind = Literal["weights", "kv", "compute", "output", "recurrent"]


DeviceNames = str | tuple[str, ...]
"""The device's name, such as `CPU` or `CUDA0`, or a tuple of several names."""


def named(names: Sequence[str]) -> DeviceNames:
    return names[0] if len(names) == 1 else tuple(names)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation as llama.cpp reports it."""

    kind: BufferKind
    device: str
    """The device's name, or its buffer type's: `CPU`, `CPU_Mapped`, `CUDA0`, `CUDA_Host`…"""
    size_bytes: int

    @property
    def is_on_host(self) -> bool:
        """Whether it is in the host's memory: plain, mapped, repacked (`CPU_REPACK`, `AMX`…) or
        pinned for a device."""
        return _HOST_TYPE.match(self.device) is not None

    def is_on(self, device: str) -> bool:
        """Whether it is in the device's own memory, or for a CPU in the host's. A device can have
        several types: `CUDA1` and `CUDA1_Split` (not `CUDA10`), `MTL0` and `MTL0_Private`."""
        if device == "CPU" or self.is_on_host:
            return device == "CPU" and self.is_on_host
        return re.match(rf"{re.escape(device)}(?!\d)", self.device) is not None


@dataclass(frozen=True, slots=True)
class Residency:
    """Where all parts of the model are, as llama.cpp reports it after the load."""

    resident: bool
    device: DeviceNames
    """The devices that hold the model: `CPU`, `CUDA0`, `MTL0`, `RPC0`…"""
    buffers: tuple[Buffer, ...]
    layers_total: int
    layers_on_device: int
    allowed_host_buffers: tuple[str, ...] = ()
    """Host buffers that the policy allows, each with the reason in one sentence."""
    watched: Literal["process", "device", "presence"] = "device"
    """What the driver reports after the load: the memory of this process, that of all processes on
    the device, or only that the device is present."""
    holder_pids: tuple[int, ...] = ()
    """Ids of which one may be the engine's, if the driver's process ids are not this system's."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the model on all its devices."""
        names = (self.device,) if isinstance(self.device, str) else self.device
        return sum(map(self.bytes_on, names))

    def bytes_on(self, device: str) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers if buffer.is_on(device))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The unchanging facts about the loaded model, from its GGUF metadata and from llama.cpp."""

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
    """The most tokens of one sequence in this worker."""
    trained_context_length: int
    embedding_length: int
    bos_token_id: int | None
    bos_token: str
    eos_token: str
    """`bos_token` and `eos_token` are spellings, empty if the model has no such token."""
    eog_token_ids: tuple[int, ...]
    has_chat_template: bool
    template_takes_tools: bool
    pooling: str | None
    """`mean`, `cls`, `last` or `rank` for a model that pools; `None` for one that generates."""
    metadata: Mapping[str, Any]
    """GGUF metadata; arrays are summarised as `[n items]`."""
    adapters: tuple[Adapter, ...] = ()
    overridden: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that replaces the file's."""
    control: ControlInfo | None = None


@dataclass(frozen=True, slots=True)
class ControlInfo:
    """What control vectors add to the outputs of layers."""

    vectors: tuple[ControlVector, ...]
    """Their paths are reduced to file names."""
    layers: tuple[int, int]
    """The first and last layer that are changed."""
    sha256: str
    """Hash of the sums that the layers add."""


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The draft model; the residency includes its buffers."""

    model_ref: str
    size_bytes: int
    n_params: int
    vocab_size: int
    context_length: int
    """The most tokens of a stream for which it guesses."""
    layers_total: int
    layers_on_device: int


@dataclass(frozen=True, slots=True)
class SpeculationInfo:
    """How the next tokens of streams are guessed."""

    kind: Literal["off", "ngram", "draft", "mtp"]
    reason: str = ""
    """Why nothing is guessed, unless speculation was turned off."""
    draft: DraftInfo | None = None


@dataclass(frozen=True, slots=True)
class ProjectorInfo:
    """The projector for pictures and sounds; the residency includes its buffers."""

    name: str
    """Name of its file."""
    kind: str
    """`gemma3`, `idefics3`…, from the file."""
    sees: bool
    hears: bool
    size_bytes: int


WallName = Literal["core_dumps", "files", "system_calls"]


@dataclass(frozen=True, slots=True)
class Wall:
    """A confinement of the engine process, which may not hold."""

    name: WallName
    holds: bool
    how: str
    """What enforces it, or why nothing does."""

    @property
    def summary(self) -> str:
        return self.how if self.holds else f"no: {self.how}"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Sent once per incarnation of the engine, after it has decoded a token."""

    model: ModelInfo
    residency: Residency
    backend: BackendName
    device: DeviceNames
    slots: int
    batch: int
    micro_batch: int
    prefill_budget: int
    """Maximum prompt tokens in a step."""
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
    device_total_bytes: int = 0
    """All memory of the device; for a CPU, the host's, or the limit of the control group."""
    kv_cells: int = 0
    """KV cells of all sequences together."""
    kv_unified: bool = False
    """Whether all slots share the cells; otherwise each slot has an equal part."""
    inter_token_target_ms: float = 0.0
    """Target duration of a step with running streams."""
    kv_divisions: tuple[int, ...] = ()
    """Into how many parts the shared cells can be divided while every sequence fits into one part;
    the best number comes first."""
    kv_reason: str = ""
    """The number of cells and how they are shared, in words."""
    kv_store_bytes: int | None = None
    """The most bytes that the KV store's files may take; `None` without a store."""
    memory_bytes: int = 0
    """The most bytes of host memory for states from which requests can continue."""
    speculation: SpeculationInfo = SpeculationInfo("off")
    projector: ProjectorInfo | None = None
    walls: tuple[Wall, ...] = ()
    findings: Mapping[str, str] = field(default_factory=dict)
    """What `doctor` would report about the machine, as of the start."""
