"""The settings of the engine process: names, ranges and help texts, each written once.

`worker/settings.py` reads them with all others and holds this object; the pipe carries it as it is.
It is a standard dataclass, so the engine process needs no pydantic. The API process validates it by
the ranges in each field's metadata.
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
"""On a CPU a piece of a prompt may take a second: with 250 ms, four times as many tokens of running
streams come late, and nothing ends sooner (`arrivals` of `make bench`). On an H200, a prompt of
4,000 tokens that joins a stream of an 8 B model waits 546 ms where 50 ms make it 652; the stream's
longest gap is 100 ms instead of 45, and 213 ms with llama-server (`join`)."""

_ROPE_FIELDS = ("rope_freq_", "yarn_")
"""What the settings begin with that `llama_context_params` has under the same name."""
_ROPE_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}
"""`llama_rope_scaling_type`."""
Pooling = Literal["none", "mean", "cls", "last", "rank"]
"""In the order of llama.cpp's numbers."""
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
    cuda_device: tuple[int, ...] = _setting((0,), "device", "index of the CUDA device; 0,1 splits the model by layers over a set of devices")
    vulkan_device: tuple[int, ...] = _setting((0,), "device", "index of the Vulkan device; 0,1 splits the model by layers over a set of devices")
    metal_device: tuple[int, ...] = _setting((0,), "device", "index of the Metal device")
    allow_software_device: bool = _setting(False, "device", "take also a Vulkan device that computes on the CPU, such as llvmpipe; --vulkan-device then counts all that the loader has")
    threads: int | None = _setting(None, "device", "compute threads; without it from the CPU budget of the container", ge=1, le=1024)
    mmap: bool | None = _setting(None, "device", "map the model file; without it on for CPUs, off for GPUs")
    mlock: bool = _setting(False, "device", "keep the model from being swapped out")
    confine: bool = _setting(True, "device", "let the kernel keep the engine process from other files than it needs, from connections and from programs; --no-confine for debuggers, or for a driver that cannot bear it")
    blas: Literal["on", "off"] = _setting("off", "device", "use the BLAS plug-in for prompts, where the wheel has one")

    chat_template: str | None = _setting(None, "model", "file of a Jinja chat template to use in place of the model's own", min_length=1)
    rope_scaling: Literal["none", "linear", "yarn"] | None = _setting(None, "model", "how positions beyond the trained length are scaled; without it as the file says")
    rope_scale: float | None = _setting(None, "model", "how many times the trained length the context is: --rope-freq-scale is 1 divided by it", gt=0, le=1e6)
    rope_freq_base: float | None = _setting(None, "model", "base frequency of the rotary embedding; without it the file's", gt=0, le=1e12)
    rope_freq_scale: float | None = _setting(None, "model", "factor of its frequencies; without it the file's", gt=0, le=1e6)
    yarn_orig_ctx: int | None = _setting(None, "model", "trained length that YaRN starts from; without it the file's", ge=1, le=2**24)
    yarn_ext_factor: float | None = _setting(None, "model", "YaRN's mix of extrapolation: 0 interpolates alone", ge=0, le=1)
    yarn_attn_factor: float | None = _setting(None, "model", "YaRN's factor of the attention's magnitude", gt=0, le=1e3)
    yarn_beta_slow: float | None = _setting(None, "model", "YaRN's correction for high dimensions", ge=0, le=1e3)
    yarn_beta_fast: float | None = _setting(None, "model", "YaRN's correction for low dimensions", ge=0, le=1e3)
    override_kv: tuple[str, ...] = _setting((), "model", "KEY=TYPE:VALUE, repeatable: metadata in place of the file's; TYPE is int, float, bool or str")
    pooling: Pooling | None = _setting(None, "model", "serve embeddings with this kind of pooling (rank: ranks), also with a model that generates; none: an embedding of each token; without it as the file says")
    control_vector: tuple[str, ...] = _setting((), "model", "FILE[:SCALE], repeatable: a control vector: a GGUF with a direction for each layer; their sum is added to the layers' outputs")
    control_vector_layer_range: tuple[int, int] | None = _setting(None, "model", "first and last layer that control vectors change; without it all")
    slots: int = _setting(8, "engine", "sequences that run at once", ge=1, le=256)
    context_length: int | None = _setting(None, "engine", "tokens that one sequence may hold; without it the model's own, at most --kv-cells", ge=32, le=2**24)
    batch: int = _setting(2048, "engine", "tokens in one decode call at most", ge=1, le=2**20)
    micro_batch: int = _setting(512, "engine", "tokens in one compute graph at most", ge=1, le=2**20)
    prefill_budget: int | None = _setting(None, "engine", "prompt tokens in a step at most; without it --micro-batch, on a GPU what takes a quarter of a second, up to --batch", ge=1, le=2**20)
    inter_token_target: int | None = _setting(None, "engine", "target time in ms of a step while streams run, so that they keep their pace while prompts join; without it 1000 on a CPU, 100 on a GPU", ge=1, le=3_600_000)
    speculate: Literal["auto", "off", "ngram", "draft", "mtp"] = _setting("auto", "engine", "how tokens are guessed and tried ahead, where that is worth it; ngram: what followed the last tokens before, in the conversation or in an earlier answer; draft: by the model of --draft, for a stream that runs alone; mtp: by the file's own layers for multi-token prediction, for a stream that runs alone (what that gains is not measured); auto: draft where --draft is given, else ngram, but off for recurrent models, which need eight states a slot for guesses; a request that gives a seed has no guesses")
    kv_type: KvType = _setting("f16", "engine", "type of the KV cache; quantised values need flash attention")
    kv_type_k: KvType | None = _setting(None, "engine", "type of its keys alone; without it --kv-type")
    kv_type_v: KvType | None = _setting(None, "engine", "type of its values alone; without it --kv-type")
    kv_cells: int | None = _setting(None, "engine", "KV cells of all sequences together; without it slots x --context-length, or what a default start takes", ge=256, le=2**27)
    kv_unified: bool | None = _setting(None, "engine", "one KV pool for all sequences; --no-kv-unified: a part for each; without either, parts while every sequence fits into its own, else one pool")
    flash_attention: Literal["auto", "on", "off"] = _setting("auto", "engine", "flash attention")
    prefix_cache: bool = _setting(True, "engine", "reuse the cells of a shared prompt prefix")
    snapshot_mib: int | None = _setting(None, "engine", "MiB of the host's memory for states to go on from: of idle and preempted sequences, and of recurrent and windowed models; without it a quarter of what is left, at most 8192; 0 = none", ge=0, le=2**20)
    kv_store: str | None = _setting(None, "engine", "a folder where the KV cells of finished requests are kept, unencrypted, for later engines and workers to go on from", min_length=1)
    kv_store_mib: int = _setting(4096, "engine", "MiB of files in --kv-store at most; one request's may have a quarter of it", ge=1, le=2**24)
    # fmt: on

    @property
    def on_gpu(self) -> bool:
        return BACKENDS[self.backend].on_gpu

    @property
    def kv_types(self) -> tuple[KvType, KvType]:
        """Of keys and values."""
        return self.kv_type_k or self.kv_type, self.kv_type_v or self.kv_type

    @property
    def rope(self) -> tuple[tuple[str, float], ...]:
        """What changes positions: fields of `llama_context_params` and their values."""
        names = (each.name for each in fields(self) if each.name.startswith(_ROPE_FIELDS))
        values = {name: getattr(self, name) for name in names}
        if self.rope_scaling is not None:
            values["rope_scaling_type"] = _ROPE_SCALINGS[self.rope_scaling]
        if self.rope_scale is not None:
            values["rope_freq_scale"] = 1 / self.rope_scale
        return tuple((name, value) for name, value in values.items() if value is not None)

    @property
    def overrides(self) -> dict[str, Value]:
        """Metadata in place of the file's; `{arch}` in a key stands for its architecture."""
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
        """The indices among the backend's own devices; none for a processor."""
        chosen_by = BACKENDS[self.backend].fields
        indices: tuple[int, ...] = getattr(self, chosen_by[0]) if chosen_by else ()
        return indices

    @property
    def maps_file(self) -> bool:
        """Whether the model file is mapped instead of read."""
        return self.mmap if self.mmap is not None else not self.on_gpu
