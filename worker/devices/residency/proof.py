"""The proof that one device, or a set of them, holds the whole model.

It is taken from llama.cpp's own report after the load. Runs in the engine process; later,
`live_check` asks the device itself. Whatever is neither on the device nor in the short list of what
must be on the host is a violation. There is no partial residency.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import accumulate, chain

from worker.devices.plan import placement
from worker.devices.residency import live_check
from worker.devices.residency.load_report import LoadReport, host_operations, parse
from worker.devices.select import Selected
from worker.errors import ResidencyViolation
from worker.llama.context import Context
from worker.llama.model import Model
from worker.models.gguf.header import GgufHeader
from worker.wire.engine_info import Buffer, Residency, named

_ROUNDING_BYTES = 64 * 1024
"""The log rounds each buffer to 0.01 MiB, and buffers are padded."""
_LOGS_GRAPHS = "GGML_SCHED_DEBUG"
"""The variable that makes ggml log the parts of a graph and their operations."""
_FAULTS_SHOWN = 3
_INPUT_SPLITS = 1
"""The part of the graph in which inputs enter, before those on the devices."""


def prove(
    context: Context, selected: Selected, header: GgufHeader, head: Context | None = None
) -> Residency:
    """Account for every buffer of a loaded model by device and bytes.

    `head` is the context of the model's layers for multi-token prediction.

    Raises:
        ResidencyViolation: something is elsewhere, or llama.cpp's report is not understood.
    """
    model, contexts = context.model, [context] if head is None else [context, head]
    report = parse(chain(model.load_log, *(each.load_log for each in contexts)))
    # Most devices call their memory by their own name; an RPC device does not.
    names = {placement.buffer_type_name(device): device.name for device in selected.devices}
    buffers = tuple(
        replace(buffer, device=names.get(buffer.device, buffer.device))
        for buffer in report.buffers
        if buffer.size_bytes
    )
    beside = [buffer for buffer in buffers if not any(map(buffer.is_on, selected.names))]
    # Asking about each tensor takes milliseconds, which a start on a CPU need not spend.
    weights = placement.NOTHING
    if beside or len(selected.cards) > 1:
        weights = placement.place(header, selected.devices, model.options.layers)
    reasons = [(each, _reason_on_host(each, selected, weights)) for each in beside]
    faults = [
        *_layers_elsewhere(report, model.options.layers, selected),
        *(
            f"{each.size_bytes:,} bytes of {each.kind} are {_where(each, selected, weights)}"
            for each, reason in reasons
            if reason is None
        ),
        *_computed_on_host(report, contexts, selected, header),
        *(_misplaced(report, buffers, weights, selected) if len(selected.cards) > 1 else ()),
        *_unproven(report, buffers, model),
    ]
    if faults:
        raise _violation(selected, buffers, faults)
    n_layers = len(report.layer_devices)
    residency = Residency(
        resident=True,
        device=named(selected.names),
        buffers=buffers,
        layers_total=n_layers,
        layers_on_device=n_layers,
        allowed_host_buffers=tuple(
            f"{each.kind} ({each.device}, {each.size_bytes:,} bytes): {reason}"
            for each, reason in reasons
        ),
    )
    residency = live_check.watch(selected, residency)
    live_check.check(selected, residency)
    return residency


def together(model: Residency, draft: Residency) -> Residency:
    """One report of the buffers of two models on one device, with the first one's layers."""
    return replace(
        model,
        buffers=model.buffers + draft.buffers,
        allowed_host_buffers=model.allowed_host_buffers + draft.allowed_host_buffers,
        holder_pids=draft.holder_pids,
    )


def _layers_elsewhere(
    report: LoadReport, layers: Sequence[int], selected: Selected
) -> Iterator[str]:
    """Layers that are not on their device; `layers` has the number of them on each device."""
    ends = list(accumulate(layers))  # none if the first device has all
    for layer, found in sorted(report.layer_devices.items()):
        device = selected.names[bisect_right(ends, layer)]
        if found != device:
            yield f"layer {layer} of {len(report.layer_devices)} is on {found}, not on {device}"


def _computed_on_host(
    report: LoadReport, contexts: Sequence[Context], selected: Selected, header: GgufHeader
) -> Iterator[str]:
    # More parts may also mean that devices take turns, so check which operations run on the host.
    if selected.is_gpu and report.splits > _INPUT_SPLITS + len(selected.cards):
        if on_host := _host_operations(contexts, header):
            yield (
                f"the compute graph falls into {report.splits} parts: {', '.join(on_host)} run on "
                f"the host, not on {', '.join(selected.names)}"
            )


def _misplaced(
    report: LoadReport, buffers: Sequence[Buffer], weights: placement.Weights, selected: Selected
) -> Iterator[str]:
    """Caches and weights that are not on the device of their layer."""
    for layer, name in sorted(report.cache_devices.items()):
        if name != report.layer_devices.get(layer):
            yield f"the cache of layer {layer} is on {name}, its weights are not"
    for name, planned in zip(selected.names, weights.device_bytes, strict=True):
        found = sum(b.size_bytes for b in buffers if b.kind == "weights" and b.device == name)
        if abs(found - planned) > _ROUNDING_BYTES + report.unused_bytes:
            yield f"{found:,} bytes of weights are on {name}, {planned:,} belong there"


def _host_operations(contexts: Sequence[Context], header: GgufHeader) -> tuple[str, ...]:
    """Lay out the graphs of these contexts once more, without allocating, to have them logged."""
    options = replace(contexts[0].model.options, mmap=False, mlock=False, no_alloc=True)
    before = os.environ.get(_LOGS_GRAPHS)
    os.environ[_LOGS_GRAPHS] = "2"
    try:
        found: dict[str, None] = {}
        with closing(Model(str(header.path), options)) as laid_out:
            for context in contexts:
                with closing(Context(laid_out, context.options)) as logged:
                    found |= dict.fromkeys(host_operations(logged.load_log))
        return tuple(found)
    finally:
        os.environ.pop(_LOGS_GRAPHS)
        if before is not None:
            os.environ[_LOGS_GRAPHS] = before


# --- accounting --------------------------------------------------------------------------


def _reason_on_host(buffer: Buffer, selected: Selected, weights: placement.Weights) -> str | None:
    """Why a GPU worker's buffer must be on the host; `None` if nothing demands it."""
    if not selected.is_gpu or not buffer.is_on_host:
        return None
    if buffer.kind == "compute":
        return "the graph's inputs, such as token ids, positions and masks, are written by the host"
    if buffer.kind == "output":
        return "logits are sampled on the host"
    fits = buffer.size_bytes <= weights.host_bytes + _ROUNDING_BYTES
    if buffer.kind == "weights" and weights.host_tensors and fits:
        return (
            f"{', '.join(weights.host_tensors)} alone; this device has no kernel that looks rows "
            "up in a tensor of that type"
        )
    return None


def _where(buffer: Buffer, selected: Selected, weights: placement.Weights) -> str:
    """Where a misplaced buffer is."""
    if not selected.is_gpu:
        return f"on {buffer.device}, not in the CPU's memory"
    if not buffer.is_on_host:
        return f"on another device, {buffer.device}"
    allowed = f" ({weights.host_bytes:,} bytes are allowed there)" if weights.host_bytes else ""
    return f"on the host ({buffer.device})" + (allowed if buffer.kind == "weights" else "")


def _unproven(report: LoadReport, buffers: Sequence[Buffer], model: Model) -> Iterator[str]:
    """What the report should account for but does not."""
    if not report.layer_devices:
        yield "llama.cpp does not say where the layers are"
    found = report.bytes_of("weights")
    expected = model.size_bytes - report.unused_bytes
    if found + _ROUNDING_BYTES < expected:
        yield f"only {found:,} of {expected:,} bytes of weights are accounted for"
    cached = sum(b.size_bytes for b in buffers if b.kind in ("kv", "recurrent"))
    if cached + _ROUNDING_BYTES < report.kv_bytes:
        yield f"only {cached:,} of {report.kv_bytes:,} bytes of the KV cache are accounted for"
    if model.options.mlock and report.not_locked:
        yield (
            f"--mlock is set, but the memory could not be locked ({report.not_locked}); raise the "
            "limit of locked memory (ulimit -l, or IPC_LOCK for a container)"
        )


def _violation(
    selected: Selected, buffers: Sequence[Buffer], faults: list[str]
) -> ResidencyViolation:
    hidden = len(faults) - _FAULTS_SHOWN
    more = f" (and {hidden} more faults)" if hidden > 0 else ""
    return ResidencyViolation(
        f"The model is not fully resident on {', '.join(selected.names)}: "
        f"{'; '.join(faults[:_FAULTS_SHOWN])}{more}.",
        device=named(selected.names),
        faults=faults,
        buffers=[asdict(buffer) for buffer in buffers],
    )
