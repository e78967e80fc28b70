"""The proof that one device holds the whole model, from llama.cpp's own report after the load.

Runs in the engine process; later, `live_check` asks the device itself. Whatever is neither on the
device nor in the short list of what must be on the host is a violation. There is no partial
residency.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from worker.devices.plan import placement
from worker.devices.residency import live_check
from worker.devices.residency.load_report import LoadReport, parse
from worker.devices.select import Selected
from worker.errors import ResidencyViolation
from worker.llama.context import Context
from worker.llama.model import Model
from worker.models.gguf.header import GgufHeader
from worker.wire.engine_info import Buffer, Residency

_ROUNDING_BYTES = 64 * 1024
"""The log rounds each buffer to 0.01 MiB, and buffers are padded."""
_MOST_SPLITS = 2
"""One part of the graph on the device, and one before it in which inputs enter."""


def prove(
    model: Model, context: Context, selected: Selected, header: GgufHeader, *, locked: bool
) -> Residency:
    """Account for every buffer of a loaded model by device and bytes.

    `locked` means that the memory was to be locked.

    Raises:
        ResidencyViolation: something is elsewhere, or llama.cpp's report is not understood.
    """
    report = parse([*model.load_log, *context.load_log])
    n_here = sum(device == selected.name for device in report.layer_devices.values())
    buffers = tuple(b for b in report.buffers if b.size_bytes)
    beside = [buffer for buffer in buffers if not _is_on(buffer, selected)]
    # Asking about each tensor takes milliseconds, which a start on a CPU need not spend.
    weights = placement.place(header, selected.device) if beside else placement.NOTHING
    residency = Residency(
        resident=True,
        device=selected.name,
        buffers=buffers,
        layers_total=len(report.layer_devices),
        layers_on_device=n_here,
        allowed_host_buffers=tuple(
            f"{each.kind} ({each.device}, {each.size_bytes:,} bytes): {reason}"
            for each in beside
            if (reason := _reason_on_host(each, selected, weights))
        ),
    )
    faults = [
        f"layer {layer} of {len(report.layer_devices)} is on {device}, not on {selected.name}"
        for layer, device in sorted(report.layer_devices.items())
        if device != selected.name
    ]
    faults += [
        f"{each.size_bytes:,} bytes of {each.kind} are {_where(each, selected, weights)}"
        for each in beside
        if not _reason_on_host(each, selected, weights)
    ]
    if selected.is_gpu and report.splits > _MOST_SPLITS:
        faults.append(
            f"the compute graph falls into {report.splits} parts, so some of its operations run on "
            f"the host and not on {selected.name}"
        )
    faults += _unproven(report, residency, model, locked)
    if faults:
        raise _violation(replace(residency, resident=False, violation=faults[0]), faults)
    residency = live_check.watch(selected, residency)
    live_check.check(selected, residency)
    return residency


def together(model: Residency, draft: Residency) -> Residency:
    """Of two models on one device: one report of all buffers, with the first one's layers."""
    return replace(
        model,
        buffers=model.buffers + draft.buffers,
        allowed_host_buffers=model.allowed_host_buffers + draft.allowed_host_buffers,
        holder_pids=draft.holder_pids,
    )


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
    """Where a buffer is that must not be there."""
    if not selected.is_gpu:
        return f"on {buffer.device}, not in the CPU's memory"
    if not buffer.is_on_host:
        return f"on a second device, {buffer.device}"
    allowed = f" ({weights.host_bytes:,} bytes are allowed there)" if weights.host_bytes else ""
    return f"on the host ({buffer.device})" + (allowed if buffer.kind == "weights" else "")


def _unproven(
    report: LoadReport, residency: Residency, model: Model, locked: bool
) -> Iterator[str]:
    """What the report should account for and does not."""
    if not report.layer_devices:
        yield "llama.cpp does not say where the layers are"
    told = report.bytes_of("weights")
    expected = model.size_bytes - report.unused_bytes
    if told + _ROUNDING_BYTES < expected:
        yield f"only {told:,} of {expected:,} bytes of weights are accounted for"
    cached = sum(b.size_bytes for b in residency.buffers if b.kind in ("kv", "recurrent"))
    if cached + _ROUNDING_BYTES < report.kv_bytes:
        yield f"only {cached:,} of {report.kv_bytes:,} bytes of the KV cache are accounted for"
    if locked and report.not_locked:
        yield (
            f"--mlock is set, but the memory could not be locked ({report.not_locked}); raise the "
            "limit of locked memory (ulimit -l, or IPC_LOCK for a container)"
        )


def _is_on(buffer: Buffer, selected: Selected) -> bool:
    if selected.device is None:
        return buffer.is_on_host
    names = {selected.name, placement.buffer_type_name(selected.device)}
    # A device may have several types of its own memory: `MTL0`, `MTL0_Private`, `MTL0_Mapped`.
    return buffer.device in names or (
        any(buffer.device.startswith(f"{name}_") for name in names) and not buffer.is_on_host
    )


def _violation(residency: Residency, faults: list[str]) -> ResidencyViolation:
    more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
    return ResidencyViolation(
        f"The model is not fully resident on {residency.device}: {faults[0]}{more}.",
        device=residency.device,
        faults=faults,
        buffers=[asdict(buffer) for buffer in residency.buffers],
    )
