"""What the engine reports when it is ready: its model, its memory and where that is.

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
"""The one device's name, such as `CPU` or `CUDA0`; those of a set as a list."""


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
        """Whether it is in the device's own memory, which may have several types: `CUDA1` and
        `CUDA1_Split`, `MTL0` and `MTL0_Private`, but not `CUDA10`; for a CPU, in the host's."""
        if device == "CPU" or self.is_on_host:
            return device == "CPU" and self.is_on_host
        return re.match(rf"{re.escape(device)}(?!\d)", self.device) is not None


@dataclass(frozen=True, slots=True)
class Residency:
    """Where all parts of the model are, as llama.cpp reports it after the load."""

    resident: bool
    device: DeviceNames
    """What holds the model: `CPU`, `CUDA0`, `MTL0`, `RPC0`…, or a set of them."""
    buffers: tuple[Buffer, ...]
    layers_total: int
    layers_on_device: int
    allowed_host_buffers: tuple[str, ...] = ()
    """Host buffers that the policy allows, each with its reason in one sentence."""
    watched: Literal["process", "device", "presence"] = "device"
    """What the driver tells after the load: the bytes of this process, those of all processes on
    the device, or only that the device is there."""
    holder_pids: tuple[int, ...] = ()
    """Processes that may be the engine, if the driver uses other process ids than this system."""

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
    """The most tokens of a single sequence in this worker."""
    trained_context_length: int
    embedding_length: int
    bos_token_id: int | None
    bos_token: str
    eos_token: str
    """Spellings; empty where the model has no such token."""
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
    """Each with the name of its file."""
    layers: tuple[int, int]
    """The first and the last that are changed."""
    sha256: str
    """Of the sum that each layer adds."""


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """The draft model that guesses; its buffers are among those of the residency."""

    model_ref: str
    size_bytes: int
    n_params: int
    vocab_size: int
    context_length: int
    """Of a stream that is guessed for, at most."""
    layers_total: int
    layers_on_device: int


@dataclass(frozen=True, slots=True)
class SpeculationInfo:
    """Who guesses what streams say next."""

    kind: Literal["off", "ngram", "draft", "mtp"]
    reason: str = ""
    """Why nobody does, unless that was asked for."""
    draft: DraftInfo | None = None


@dataclass(frozen=True, slots=True)
class ProjectorInfo:
    """What the model sees and hears with; its buffers are among those of the residency."""

    name: str
    """Of its file."""
    kind: str
    """`gemma3`, `idefics3`…, as the file says."""
    sees: bool
    hears: bool
    size_bytes: int


WallName = Literal["core_dumps", "files", "system_calls"]


@dataclass(frozen=True, slots=True)
class Wall:
    """One thing that the engine process can no longer do, if it holds."""

    name: WallName
    holds: bool
    how: str
    """What holds it, or why nothing does."""

    @property
    def told(self) -> str:
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
    """Prompt tokens in a step at most."""
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
    """All memory of the device; for a CPU, that of the host or the limit of its control group."""
    kv_cells: int = 0
    """KV cells of all sequences together."""
    kv_unified: bool = False
    """Whether all slots share the cells; otherwise each slot has an equal part."""
    inter_token_target_ms: float = 0.0
    """The target for the time of a step with running streams."""
    kv_divisions: tuple[int, ...] = ()
    """The numbers of parts into which the shared cells are divided while every sequence fits into
    one, the best first."""
    kv_reason: str = ""
    """The choice of the KV cache, in words."""
    kv_store_bytes: int | None = None
    """That the files of the KV store may take; `None` without one."""
    memory_bytes: int = 0
    """The most bytes of states in the host's memory that requests may go on from."""
    speculation: SpeculationInfo = SpeculationInfo("off")
    projector: ProjectorInfo | None = None
    walls: tuple[Wall, ...] = ()
    findings: Mapping[str, str] = field(default_factory=dict)
    """What `doctor` says of the machine, as it was at the start."""
