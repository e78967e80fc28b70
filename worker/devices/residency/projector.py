"""The proof that a projector is on the model's device, from libmtmd's report of its load."""

from __future__ import annotations

import re
from collections.abc import Iterable

from worker.devices.plan.placement import buffer_type_name
from worker.devices.select import Selected
from worker.errors import ResidencyViolation
from worker.models.gguf.header import GgufHeader
from worker.wire.engine_info import Buffer

_MIB = 1 << 20
_BACKEND = re.compile(r"clip_ctx: CLIP using (?P<name>\S+) backend$")
_COMPUTE = re.compile(
    r"reserve_compute_meta: +(?P<device>\S+) compute buffer size = +(?P<size>[\d.]+) MiB$"
)


def prove(lines: Iterable[str], selected: Selected, header: GgufHeader) -> tuple[Buffer, ...]:
    """A projector's buffers. libmtmd puts all weights into the memory of the backend that it uses
    and names first. It reports its compute buffers once for each encoder and trial; the largest
    counts.

    Raises:
        ResidencyViolation: it is elsewhere, or libmtmd's report is not understood.
    """
    on_cpu = False
    computes: dict[str, int] = {}
    for line in lines:
        if match := _BACKEND.match(line.rstrip()):
            on_cpu |= match["name"] == "CPU"
        elif match := _COMPUTE.match(line.rstrip()):
            size = round(float(match["size"]) * _MIB)
            computes[match["device"]] = max(size, computes.get(match["device"], 0))
    [name] = selected.first.names
    own = buffer_type_name(selected.devices[0]) if selected.is_gpu else name
    if own not in computes or on_cpu == selected.is_gpu:
        found = ", ".join(computes) or "no device that libmtmd names"
        raise ResidencyViolation(f"The projector computes on {found}, not on {name}.", device=name)
    weights = Buffer("weights", own, header.tensor_bytes)
    return (weights, *(Buffer("compute", device, size) for device, size in computes.items()))
