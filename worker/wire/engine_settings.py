"""The settings of the engine process: names, ranges and help texts, each defined once.

`worker/settings.py` reads them together with all others and holds this object, which crosses the
pipe unchanged. It is a standard dataclass, so that the engine process needs no pydantic. The API
process validates it by the ranges in each field's metadata.
"""

# ruff: noqa: E501 - the settings are a table, one a line
from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from worker.wire.adapters import ControlVector, parse_control_vector
from worker.wire.backends import BACKENDS, BackendName
from worker.wire.overrides import Value, parse_override

KvType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]

CPU_INTER_TOKEN_MS, GPU_INTER_TOKEN_MS = 1000.0, 100.0
"""Defaults of `inter_token_target`. On a CPU, a chunk of a prompt may take a second: with 250 ms,
four times as many tokens of running streams come late, and nothing ends sooner (`arrivals` of
`make bench`). On an H200, a prompt of 4,000 tokens that joins a stream of an 8 B model waits
546 ms, and with a target of 50 ms 652 ms; the stream's longest gap is 100 ms instead of 45 ms, and
213 ms with llama-server (`join`)."""

_ROPE_FIELDS = ("rope_freq_", "yarn_")
"""Prefixes of the settings that are fields of `llama_context_params` under the same name."""
_ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}
"""`llama_rope_scaling_type`."""
Pooling = Literal["none", "mean", "cls", "last", "rank"]
"""In the order of llama.cpp's enum `llama_pooling_type`."""
_POOLING_KEY = "{arch}.pooling_type"


def _setting(default: Any, group: str, text: str, **limits: Any) -> Any:
    extra = {"group": group}
    return field(
        default=default, metadata={"description": text, "json_schema_extra": extra, **limits}
    )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one device serves one model. `Settings` has checked that all values are in range."""

    backend: BackendName = _setting("cpu", "", "set by the command")

    # fmt: off
    cuda_device: tuple[int, ...] = _setting((0,), "device", "index of the CUDA device; 0,1 splits the model by layers over several devices")
    vulkan_device: tuple[int, ...] = _setting((0,), "device", "index of the Vulkan device; 0,1 splits the model by layers over several devices")
    metal_device: tuple[int, ...] = _setting((0,), "device", "index of the Metal device")
    allow_software_device: bool = _setting(False, "device", "also accept a Vulkan device that computes on the CPU, such as llvmpipe; --vulkan-device then counts all devices of the Vulkan loader")
    threads: int | None = _setting(None, "device", "compute threads; default: derived from the container's CPU budget", ge=1, le=1024)
    mmap: bool | None = _setting(None, "device", "map the model file into memory instead of reading it; default: on for CPUs, off for GPUs")
    mlock: bool = _setting(False, "device", "lock the model in memory, so that it is never swapped out")
    confine: bool = _setting(True, "device", "let the kernel deny the engine process files that it does not need, network connections and the start of programs; --no-confine for debuggers, or for a driver that does not work with it")
    blas: Literal["on", "off"] = _setting("off", "device", "use the BLAS plug-in for prompts, if the wheel has one")

    chat_template: str | None = _setting(None, "model", "file with a Jinja chat template that replaces the model's own", min_length=1)
    rope_scaling: Literal["none", "linear", "yarn"] | None = _setting(None, "model", "how positions beyond the trained length are scaled; default: as in the model file")
    rope_scale: float | None = _setting(None, "model", "context length as a multiple of the trained length; --rope-freq-scale is its reciprocal", gt=0, le=1e6)
    rope_freq_base: float | None = _setting(None, "model", "base frequency of the rotary embedding; default: the model file's", gt=0, le=1e12)
    rope_freq_scale: float | None = _setting(None, "model", "factor of the rotary embedding's frequencies; default: the model file's", gt=0, le=1e6)
    yarn_orig_ctx: int | None = _setting(None, "model", "trained context length that YaRN extends; default: the model file's", ge=1, le=2**24)
    yarn_ext_factor: float | None = _setting(None, "model", "YaRN's extrapolation mix factor; 0: interpolation only", ge=0, le=1)
    yarn_attn_factor: float | None = _setting(None, "model", "YaRN's factor for the magnitude of attention", gt=0, le=1e3)
    yarn_beta_slow: float | None = _setting(None, "model", "YaRN's high correction dimension (alpha)", ge=0, le=1e3)
    yarn_beta_fast: float | None = _setting(None, "model", "YaRN's low correction dimension (beta)", ge=0, le=1e3)
    override_kv: tuple[str, ...] = _setting((), "model", "KEY=TYPE:VALUE, repeatable: metadata that replaces the model file's; TYPE is int, float, bool or str")
    pooling: Pooling | None = _setting(None, "model", "serve embeddings with this kind of pooling, even if the model generates text; rank: scores of a reranker; none: an embedding for each token; default: as in the model file")
    control_vector: tuple[str, ...] = _setting((), "model", "FILE[:SCALE], repeatable: a control vector, a GGUF file with a direction for each layer; the sum of all is added to the layers' outputs")
    control_vector_layer_range: tuple[int, int] | None = _setting(None, "model", "first and last layer that control vectors change; default: all layers")
    slots: int = _setting(8, "engine", "sequences that run at once", ge=1, le=256)
    context_length: int | None = _setting(None, "engine", "maximum tokens of one sequence; default: the model's own maximum, limited by --kv-cells", ge=32, le=2**24)
    batch: int = _setting(2048, "engine", "maximum tokens in one decode call", ge=1, le=2**20)
    micro_batch: int = _setting(512, "engine", "maximum tokens in one compute graph", ge=1, le=2**20)
    prefill_budget: int | None = _setting(None, "engine", "maximum prompt tokens in a step; default: --micro-batch; on a GPU what takes a quarter of a second, up to --batch", ge=1, le=2**20)
    inter_token_target: int | None = _setting(None, "engine", "target duration in ms of a step while streams run, so that they keep their pace when prompts join; default: 1000 on a CPU, 100 on a GPU", ge=1, le=3_600_000)
    speculate: Literal["auto", "off", "ngram", "draft", "mtp"] = _setting("auto", "engine", "how tokens are guessed ahead and verified, where that pays off; ngram: from what followed the same tokens earlier in the conversation or in an earlier answer; draft: by the model of --draft, for a stream that runs alone; mtp: by the model file's own layers for multi-token prediction, for a stream that runs alone (the gain has not been measured); auto: draft if --draft is given, else ngram, but off for recurrent models, which need eight states per slot for guesses; nothing is guessed for a request with a seed")
    kv_type: KvType = _setting("f16", "engine", "type of the KV cache; a quantised type of the values needs flash attention")
    kv_type_k: KvType | None = _setting(None, "engine", "type of the KV cache's keys; default: --kv-type")
    kv_type_v: KvType | None = _setting(None, "engine", "type of the KV cache's values; default: --kv-type")
    kv_cells: int | None = _setting(None, "engine", "KV cells of all sequences together; default: --slots x --context-length if that is given, else by the model and the memory", ge=256, le=2**27)
    kv_unified: bool | None = _setting(None, "engine", "one KV pool for all sequences; --no-kv-unified: an equal part for each; default: parts while every sequence fits into its own, else one pool")
    flash_attention: Literal["auto", "on", "off"] = _setting("auto", "engine", "flash attention")
    prefix_cache: bool = _setting(True, "engine", "reuse the cells of a shared prompt prefix")
    snapshot_mib: int | None = _setting(None, "engine", "MiB of host memory for states from which requests continue: of idle and preempted sequences, and of recurrent and sliding-window models; default: a quarter of what is left, at most 8192; 0: none", ge=0, le=2**20)
    kv_store: str | None = _setting(None, "engine", "a folder that keeps the KV cells of finished requests, unencrypted, for later engines and workers to continue from", min_length=1)
    kv_store_mib: int = _setting(4096, "engine", "maximum MiB of the files in --kv-store; those of one request may take a quarter of it", ge=1, le=2**24)
    # fmt: on

    @property
    def on_gpu(self) -> bool:
        return BACKENDS[self.backend].on_gpu

    @property
    def kv_types(self) -> tuple[KvType, KvType]:
        return self.kv_type_k or self.kv_type, self.kv_type_v or self.kv_type

    @property
    def rope(self) -> tuple[tuple[str, float], ...]:
        """The fields of `llama_context_params` that scale positions, with their values."""
        names = (each.name for each in fields(self) if each.name.startswith(_ROPE_FIELDS))
        values = {name: getattr(self, name) for name in names}
        if self.rope_scaling is not None:
            values["rope_scaling_type"] = _ROPE_SCALINGS[self.rope_scaling]
        if self.rope_scale is not None:
            values["rope_freq_scale"] = 1 / self.rope_scale
        return tuple((name, value) for name, value in values.items() if value is not None)

    @property
    def overrides(self) -> dict[str, Value]:
        """Metadata that replaces the file's; `{arch}` in a key stands for its architecture."""
        values = dict(map(parse_override, self.override_kv))
        if self.pooling is not None:
            values[_POOLING_KEY] = get_args(Pooling).index(self.pooling)
        return values

    @property
    def control_vectors(self) -> tuple[ControlVector, ...]:
        return tuple(map(parse_control_vector, self.control_vector))

    @property
    def inter_token_ms(self) -> float:
        """The value of `inter_token_target`, or the backend's default."""
        if self.inter_token_target is not None:
            return self.inter_token_target
        return GPU_INTER_TOKEN_MS if self.on_gpu else CPU_INTER_TOKEN_MS

    @property
    def kv_store_bytes(self) -> int | None:
        """The most bytes of the KV store's files; `None` without a store."""
        return None if self.kv_store is None else self.kv_store_mib << 20

    @property
    def device_indices(self) -> tuple[int, ...]:
        """Indices among the backend's own devices; empty for a CPU."""
        chosen_by = BACKENDS[self.backend].fields
        indices: tuple[int, ...] = getattr(self, chosen_by[0]) if chosen_by else ()
        return indices

    @property
    def maps_file(self) -> bool:
        """Whether the model file is mapped instead of read."""
        return self.mmap if self.mmap is not None else not self.on_gpu
