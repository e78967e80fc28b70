"""Parses llama.cpp's log of a load: which buffer is where, and how large it is.

Only the log tells the placement, so its wording is part of the interface. The patterns below are
those of the pinned release. A line about placement that matches none of them is an error. Pure
text; runs wherever a model is loaded or planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from worker.errors import ResidencyViolation
from worker.wire.engine_info import Buffer, BufferKind

_MIB = 1024 * 1024

# The functions of llama.cpp whose every line must be understood.
_PLACING = re.compile(
    r"^(load_tensors|done_getting_tensors|llama_kv_cache\w*|llama_memory_\w+|llama_dsv4\w*|"
    r"llama_context|sched_reserve)\b"
)
_MENTIONS_BUFFER = re.compile(r"buffer size|assigned to device|\bdev = ")

# Lines of those functions that tell nothing about placement.
_SILENT = [
    re.compile(pattern)
    for pattern in (
        r"load_tensors: loading model tensors, this can take a while\.\.\. \(load_mode = .+\)$",
        r"load_tensors: offloading output layer to GPU$",
        r"load_tensors: offloading \d+ repeating layers to GPU$",
        r"load_tensors: enabling prefetch for '.+'$",
        r"done_getting_tensors: partial load .+$",
        r"llama_context: constructing llama_context$",
        r"llama_context: (n_seq_max|n_ctx|n_ctx_seq|n_batch|n_ubatch|causal_attn|flash_attn|"
        r"kv_unified|freq_base|freq_scale|n_rs_seq|n_outputs_max|n_outputs_max_per_seq) += \S+$",
        r"llama_context: n_ctx_seq \(\d+\) [<>] n_ctx_train \(\d+\) -- .+$",
        r"llama_context: n_ctx is not divisible by n_seq_max - rounding down to \d+$",
        r"llama_context: setting new yarn_attn_factor = .+$",
        r"llama_context: n_rs_seq=\d+ requested but .+$",
        r"llama_context: (enumerating backends|backend_ptrs\.size\(\) = \d+)$",
        r"llama_context: (pipeline parallelism enabled|graph reuse disabled)$",
        r"llama_context: setting backend sampler for seq_id \d+ \(n = \d+\)$",
        r"llama_kv_cache\w*: attn_rot_[kv] = .+$",
        r"llama_kv_cache\w*: attention rotation force disabled .+$",
        r"llama_kv_cache\w*: the V embeddings have different sizes across layers .+$",
        r"llama_kv_cache\w*: using full-size SWA cache .+$",
        r"llama_(kv_cache|memory)\w*: creating .*(KV cache|state).*$",
        r"llama_kv_cache\w*: reusing layers:$",
        r"llama_kv_cache\w*: - layer +\d+: (no reuse|filtered|reuse layer \d+, is_swa = \d)$",
        r"llama_kv_cache\w*: layer +\d+: (filtered|does not have KV cache|sharing with layer .+)$",
        r"llama_kv_cache\w*: kv_size = \d+ overridden to \d+ .+$",
        r"llama_memory_recurrent: layer +\d+: skipped$",
        r"sched_reserve: reserving \.\.\.$",
        r"sched_reserve: max_nodes = \d+$",
        r"sched_reserve: reserving full memory module$",
        r"sched_reserve: worst-case: n_tokens = \d+, n_seqs = \d+, n_outputs = \d+$",
        r"sched_reserve: reserve took .+$",
        r"sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism$",
    )
]


@dataclass(slots=True)
class LoadReport:
    """The information in the log of a model load and of a context creation."""

    buffers: list[Buffer] = field(default_factory=list)
    layer_devices: dict[int, str] = field(default_factory=dict)
    """The device of each layer; the output layer is the last one."""
    offloaded_layers: int | None = None
    total_layers: int | None = None
    kv_layer_devices: dict[int, str] = field(default_factory=dict)
    kv_layers_announced: int = 0
    """The number of layers that the caches claim, and the number whose device the log names."""
    kv_layers_placed: int = 0
    kv_bytes: int = 0
    """The caches' own sums, which are right even if nothing is allocated."""
    splits: int = 0
    """Parts of the compute graph; neighbouring parts run on different devices."""
    overridden: dict[str, str] = field(default_factory=dict)
    """The buffer type of each tensor whose placement was overridden."""
    unused_bytes: int = 0
    """Bytes of tensors in the file that llama.cpp does not load."""
    not_locked: str | None = None
    """Why memory could not be locked, in llama.cpp's words."""

    def bytes_of(self, kind: str) -> int:
        return sum(buffer.size_bytes for buffer in self.buffers if buffer.kind == kind)


def parse(lines: Iterable[str]) -> LoadReport:
    """Parse the log; raises `ResidencyViolation` if a line about placement is not understood."""
    report = LoadReport()
    for raw in lines:
        line = raw.rstrip()
        if not _apply(report, line) and _speaks_of_placement(line):
            raise ResidencyViolation(
                f"llama.cpp reports on placement in unknown words, so nothing can be proven: "
                f"{line.strip()!r}. Use the llama-cpp-python release that this worker is pinned "
                "to.",
                line=line.strip(),
            )
    return report


def _apply(report: LoadReport, line: str) -> bool:
    for pattern, apply in _TELLING:
        if match := pattern.match(line):
            apply(report, match)
            return True
    return False


def _speaks_of_placement(line: str) -> bool:
    if not _PLACING.match(line):
        return bool(_MENTIONS_BUFFER.search(line)) and not line.startswith("resolve_fused_ops:")
    return not any(pattern.match(line) for pattern in _SILENT)


def _bytes(mebibytes: str) -> int:
    return round(float(mebibytes) * _MIB)


def _buffer(kind: BufferKind) -> Callable[[LoadReport, re.Match[str]], None]:
    def apply(report: LoadReport, match: re.Match[str]) -> None:
        report.buffers.append(Buffer(kind, match["device"], _bytes(match["size"])))

    return apply


def _layer(report: LoadReport, match: re.Match[str]) -> None:
    report.layer_devices[int(match["layer"])] = match["device"]


def _kv_layer(report: LoadReport, match: re.Match[str]) -> None:
    report.kv_layers_placed += 1
    _state_layer(report, match)


def _state_layer(report: LoadReport, match: re.Match[str]) -> None:
    """Record a layer's device; if its caches or states have different devices, both are named."""
    layer, device = int(match["layer"]), match["device"]
    known = report.kv_layer_devices.setdefault(layer, device)
    if device not in known.split(" and "):
        report.kv_layer_devices[layer] = f"{known} and {device}"


def _offloaded(report: LoadReport, match: re.Match[str]) -> None:
    report.offloaded_layers = int(match["count"])
    report.total_layers = int(match["total"])


def _kv_sum(report: LoadReport, match: re.Match[str]) -> None:
    _state_sum(report, match)
    report.kv_layers_announced += int(match["layers"])


def _state_sum(report: LoadReport, match: re.Match[str]) -> None:
    report.kv_bytes += _bytes(match["size"])


def _splits(report: LoadReport, match: re.Match[str]) -> None:
    report.splits = max(int(count) for count in match["splits"].split(" / "))


def _overridden(report: LoadReport, match: re.Match[str]) -> None:
    report.overridden[match["tensor"]] = match["device"]


def _unused(report: LoadReport, match: re.Match[str]) -> None:
    report.unused_bytes += int(match["size"])


def _not_locked(report: LoadReport, match: re.Match[str]) -> None:
    report.not_locked = match["reason"]


def _ignore(_report: LoadReport, _match: re.Match[str]) -> None:
    """Accept a line that names a device but places nothing there."""


_DEVICE = r"(?P<device>\S+)"
_LAYER = rf"layer +(?P<layer>\d+): dev = {_DEVICE}$"
_SIZE = r"size = +(?P<size>[\d.]+) MiB"
_TELLING: list[tuple[re.Pattern[str], Callable[[LoadReport, re.Match[str]], None]]] = [
    (re.compile(pattern), apply)
    for pattern, apply in (
        (rf"load_tensors: +{_DEVICE} model buffer {_SIZE}$", _buffer("weights")),
        (
            r"load_tensors: layer +(?P<layer>\d+) assigned to device (?P<device>[^,]+), "
            r"is_swa = \d$",
            _layer,
        ),
        (r"load_tensors: offloaded (?P<count>\d+)/(?P<total>\d+) layers to GPU$", _offloaded),
        (
            rf"tensor (?P<tensor>\S+) \(\d+ MiB \w+\) buffer type overridden to {_DEVICE}$",
            _overridden,
        ),
        (
            r"done_getting_tensors: tensor '.+' \(\w+\) \(and \d+ others\) cannot be used with "
            r"preferred buffer type \S+, using \S+ instead$",
            _ignore,
        ),
        (r"model has unused tensor \S+ \(size = (?P<size>\d+) bytes\) -- ignoring$", _unused),
        (r"warning: (?P<reason>(failed to mlock|mlock not supported).*)$", _not_locked),
        (rf"llama_adapter_lora_init_impl: +{_DEVICE} LoRA buffer {_SIZE}$", _buffer("weights")),
        (rf"llama_context: +{_DEVICE} +output buffer {_SIZE}$", _buffer("output")),
        (rf"llama_kv_cache: {_LAYER}", _kv_layer),
        (rf"llama_kv_cache: +{_DEVICE} KV buffer {_SIZE}$", _buffer("kv")),
        (rf"llama_kv_cache: {_SIZE} \( *\d+ cells, +(?P<layers>\d+) layers, .+$", _kv_sum),
        (rf"llama_memory_recurrent, {_LAYER}", _state_layer),
        (rf"llama_memory_recurrent: +{_DEVICE} RS buffer {_SIZE}$", _buffer("recurrent")),
        (rf"llama_memory_recurrent: {_SIZE} \( *\d+ cells, .+$", _state_sum),
        (rf"llama_dsv4_comp_state: {_LAYER}", _state_layer),
        (
            rf"llama_dsv4_comp_state: +{_DEVICE} DSV4 .+ state buffer {_SIZE}$",
            _buffer("recurrent"),
        ),
        (rf"llama_dsv4_comp_state: .+ layers = \d+, {_SIZE}$", _state_sum),
        (rf"sched_reserve: +{_DEVICE} compute buffer {_SIZE}$", _buffer("compute")),
        (
            r"sched_reserve: graph.*: nodes = .+, splits = (?P<splits>\d+( / \d+)?), "
            r"input objects = .+$",
            _splits,
        ),
    )
]
