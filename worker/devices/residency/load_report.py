"""Parses llama.cpp's log of a load: which buffer is where, and how large it is.

Only the log reports the placement, so its wording is part of the interface. The patterns below are
those of the pinned release. A line about placement that matches none of them is an error. Pure
text; runs wherever a model is loaded or planned.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from worker.errors import ResidencyViolation
from worker.wire.engine_info import Buffer, BufferKind

_MIB = 1024 * 1024

_PLACING = re.compile(
    r"(load_tensors|done_getting_tensors|llama_kv_cache\w*|llama_memory_\w+|llama_dsv4\w*|"
    r"llama_context|sched_reserve)\b|"
    r"(?!resolve_fused_ops:).*(buffer size|assigned to device|\bdev = )"
)
"""Lines that must be understood: those of these functions, and all others that place something."""
_SILENT = r"""
load_tensors: loading model tensors, this can take a while\.\.\. \(load_mode = .+\)
load_tensors: (offloading (output layer|\d+ repeating layers)|offloaded \d+/\d+ layers) to GPU
load_tensors: enabling prefetch for '.+'
done_getting_tensors: partial load .+
done_getting_tensors: tensor '.+' .+ cannot be used with preferred buffer type .+ instead
llama_context: (constructing llama_context|pipeline parallelism enabled|graph reuse disabled)
llama_context: (enumerating backends|backend_ptrs\.size\(\) = \d+)
llama_context: (n_seq_max|n_ctx|n_ctx_seq|n_batch|n_ubatch|n_rs_seq|n_outputs_max) += \S+
llama_context: (n_outputs_max_per_seq|causal_attn|flash_attn|kv_unified|freq_base|freq_scale) += \S+
llama_context: n_ctx_seq \(\d+\) [<>] n_ctx_train \(\d+\) -- .+
llama_context: n_ctx is not divisible by n_seq_max - rounding down to \d+
llama_context: setting new yarn_attn_factor = .+
llama_context: n_rs_seq=\d+ requested but .+
llama_context: setting backend sampler for seq_id \d+ \(n = \d+\)
llama_kv_cache\w*: attn_rot_[kv] = .+
llama_kv_cache\w*: attention rotation force disabled .+
llama_kv_cache\w*: the V embeddings have different sizes across layers .+
llama_kv_cache\w*: using full-size SWA cache .+
llama_(kv_cache|memory)\w*: creating .*(KV cache|state).*
llama_kv_cache\w*: reusing layers:
llama_kv_cache\w*: - layer +\d+: (no reuse|filtered|reuse layer \d+, is_swa = \d)
llama_kv_cache\w*: layer +\d+: (filtered|does not have KV cache|sharing with layer .+)
llama_kv_cache\w*: kv_size = \d+ overridden to \d+ .+
llama_memory_recurrent: layer +\d+: skipped
sched_reserve: (reserving \.\.\.|reserving full memory module|max_nodes = \d+|reserve took .+)
sched_reserve: worst-case: n_tokens = \d+, n_seqs = \d+, n_outputs = \d+
sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism
""".strip().splitlines()
"""Lines of those functions that say nothing about placement."""
_GRAPH_PART = re.compile(r"## SPLIT #(?P<number>\d+): (?P<backend>\S+) # ")
_GRAPH_NODE = re.compile(r"node # *\d+ \( *(?P<operation>\w+)\)")
_HOST_BACKENDS = ("CPU", "BLAS")
_IS_SILENT = re.compile("|".join(_SILENT))


@dataclass(slots=True)
class LoadReport:
    """The information in the log of a model load and of a context creation."""

    buffers: list[Buffer] = field(default_factory=list)
    cache_devices: dict[int, str] = field(default_factory=dict)
    """The device of each layer's cache."""
    kv_by_device: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    """The caches' reported sizes by device; each cache's is divided evenly among its layers."""
    layer_devices: dict[int, str] = field(default_factory=dict)
    """The device of each layer; the output layer is the last one."""
    kv_bytes: int = 0
    """The caches' reported sizes, which are right even if nothing is allocated."""
    largest_kv_bytes: int = 0
    """The largest tensor of cells: the keys or the values of one layer."""
    splits: int = 0
    """Parts of the largest compute graph; neighbouring parts run on different devices."""
    unused_bytes: int = 0
    """Bytes of tensors in the file that llama.cpp does not load."""
    not_locked: str | None = None
    """Why memory could not be locked, in llama.cpp's words."""
    _cached_on: list[str] = field(default_factory=list)
    """The devices of the layers that were listed for the next cache."""

    def bytes_of(self, kind: str) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers if buffer.kind == kind)

    def enter(self, fact: BufferKind | Fact, match: re.Match[str]) -> None:
        """Enter what a line reports."""
        match fact:
            case "layer":
                self.layer_devices[int(match["layer"])] = match["device"]
            case "cached":
                self.cache_devices[int(match["layer"])] = match["device"]
                self._cached_on.append(match["device"])
            case "cells":
                tensors = map(_bytes, _KEYS_OR_VALUES.findall(match.string))
                self._end_cache(_bytes(match["size"]), max(tensors, default=0))
            case "splits":
                self.splits = max(self.splits, *map(int, match["splits"].split(" / ")))
            case "unused":
                self.unused_bytes += int(match["size"])
            case "not locked":
                self.not_locked = match["reason"]
            case kind:
                self.buffers.append(Buffer(kind, match["device"], _bytes(match["size"])))

    def _end_cache(self, size: int, largest: int) -> None:
        """Enter the size of the cache whose layers were listed last, and the size of all its keys
        or of all its values, whichever is larger."""
        n_layers = len(self._cached_on) or 1
        self.largest_kv_bytes = max(self.largest_kv_bytes, largest // n_layers)
        self.kv_bytes += size
        for device in self._cached_on:
            self.kv_by_device[device] += size / n_layers
        self._cached_on.clear()


def host_operations(lines: Iterable[str]) -> tuple[str, ...]:
    """The operations of the compute graphs that run on the host after the first part on a device.

    `lines` have the graphs as GGML_SCHED_DEBUG=2 logs them. The last two count, those of a prompt
    and of single tokens; earlier ones were laid out to find out what the devices can do.
    """
    graphs: list[dict[str, None]] = []
    on_host = has_begun = False
    for line in lines:
        if part := _GRAPH_PART.match(line):
            if part["number"] == "0":
                graphs.append({})
                has_begun = False
            on_host = part["backend"] in _HOST_BACKENDS
            has_begun |= not on_host
        elif has_begun and on_host and (node := _GRAPH_NODE.match(line)):
            graphs[-1][node["operation"]] = None
    return tuple(dict.fromkeys(name for graph in graphs[-2:] for name in graph))


def parse(lines: Iterable[str]) -> LoadReport:
    """Parse the log; raises `ResidencyViolation` if a line about placement is not understood."""
    report = LoadReport()
    for raw in lines:
        line = raw.rstrip()
        matches = ((fact, pattern.fullmatch(line)) for fact, pattern in _FACTS)
        found = next(((fact, match) for fact, match in matches if match), None)
        if found is not None:
            report.enter(*found)
        elif _PLACING.match(line) and not _IS_SILENT.fullmatch(line):
            raise ResidencyViolation(
                f"llama.cpp reports on placement in unknown words, so nothing can be proven: "
                f"{line.strip()!r}. Use the llama-cpp-python release that this worker is pinned "
                "to.",
                line=line.strip(),
            )
    return report


def _bytes(mebibytes: str) -> int:
    return round(float(mebibytes) * _MIB)


Fact = Literal["layer", "cached", "cells", "splits", "unused", "not locked"]
_DEVICE, _LAYER = r"(?P<device>\S+)", r"layer +(?P<layer>\d+)"
_BUFFER = f"+{_DEVICE}"
_SIZE = r"size = +(?P<size>[\d.]+) MiB"
_SPLITS = r"splits = (?P<splits>\d+( / \d+)?)"
_KEYS_OR_VALUES = re.compile(r", [KV] \(\w+\): +([\d.]+) MiB")
_PATTERNS: list[tuple[BufferKind | Fact, str]] = [
    ("weights", rf"load_tensors: {_BUFFER} model buffer {_SIZE}"),
    ("weights", rf"llama_adapter_lora_init_impl: {_BUFFER} LoRA buffer {_SIZE}"),
    ("output", rf"llama_context: {_BUFFER} +output buffer {_SIZE}"),
    ("kv", rf"llama_kv_cache: {_BUFFER} KV buffer {_SIZE}"),
    ("recurrent", rf"llama_memory_recurrent: {_BUFFER} RS buffer {_SIZE}"),
    ("recurrent", rf"llama_dsv4_comp_state: {_BUFFER} DSV4 .+ state buffer {_SIZE}"),
    ("compute", rf"sched_reserve: {_BUFFER} compute buffer {_SIZE}"),
    ("layer", rf"load_tensors: {_LAYER} assigned to device (?P<device>[^,]+), is_swa = \d"),
    ("cached", rf"llama_(kv_cache:|memory_recurrent,|dsv4_comp_state:) {_LAYER}: dev = {_DEVICE}"),
    ("cells", rf"llama_(kv_cache|memory_recurrent): {_SIZE} \( *\d+ cells, .+"),
    ("cells", rf"llama_dsv4_comp_state: .+ layers = \d+, {_SIZE}"),
    ("splits", rf"sched_reserve: graph.*: nodes = .+, {_SPLITS}, input objects = .+"),
    ("unused", r"model has unused tensor \S+ \(size = (?P<size>\d+) bytes\) -- ignoring"),
    ("not locked", r"warning: (?P<reason>(failed to mlock|mlock not supported).*)"),
]
_FACTS = [(fact, re.compile(pattern)) for fact, pattern in _PATTERNS]
