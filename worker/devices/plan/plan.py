"""A memory plan as a value: its parts, its verdict and its presentation.

Frozen data, so it may cross threads and processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from worker.devices.plan.cells import STATES_AT_ONCE
from worker.errors import InsufficientVram
from worker.expectations import counted
from worker.wire.engine_info import DeviceNames, named

_MIB = 1 << 20
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One device's part of a plan; a CPU, or the only GPU, has all of it."""

    device: str
    available_bytes: int
    """Bytes free on the device now; for a CPU, what the host or the control group leaves."""
    parts: Mapping[str, int]
    """Bytes on the device: `weights`, `kv`, `compute`, `output`, `margin` and, if there are any,
    `states`, `kv_store`, `draft`, `projector`, `embeddings`."""

    @property
    def needed_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: str
    shares: tuple[Share, ...]
    """One for each device, in their order."""
    layers: tuple[int, ...] = ()
    """The layers on each of several devices; the output layer counts as one."""
    host_parts: Mapping[str, int]
    """Bytes that a GPU worker needs on the host."""
    context_length: int
    """The most tokens of one sequence."""
    trained_context_length: int
    capped: bool = False
    """Whether there are fewer cells than by default, because the default does not fit."""
    slots: int
    kv_cells: int
    """KV cells of all sequences together."""
    kv_unified: bool
    """Whether the sequences share the cells; otherwise each slot has an equal part."""
    kv_divisions: tuple[int, ...] = ()
    """The numbers of parts into which the shared cells are divided while every sequence fits into
    one, the best first."""
    kv_reason: str
    """Why the KV cache is laid out like this, in words."""
    largest_context_length: int | None = None
    """The largest that fits with these slots; set if the plan does not fit, 0 if none does."""
    largest_slots: int | None = None
    """The most slots that fit with this context length; set if the plan does not fit, 0 if none."""

    @property
    def device(self) -> DeviceNames:
        return named([share.device for share in self.shares])

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by part on all devices together."""
        parts: Counter[str] = Counter()
        for share in self.shares:
            parts.update(share.parts)
        return dict(parts)

    @property
    def needed_bytes(self) -> int:
        return sum(share.needed_bytes for share in self.shares)

    @property
    def available_bytes(self) -> int:
        return sum(share.available_bytes for share in self.shares)

    @property
    def memory_bytes(self) -> int:
        """Memory for saved states of prompts. With a store, it includes one of the store's states;
        the other is being read."""
        states, stored = (
            self.parts.get(part, 0) + self.host_parts.get(part, 0)
            for part in ("states", "kv_store")
        )
        return states + stored // STATES_AT_ONCE

    @property
    def fits(self) -> bool:
        return all(share.fits for share in self.shares)

    def refusal(self) -> InsufficientVram:
        """The error for a plan that does not fit, with the sizes that would."""
        too_full = max(self.shares, key=lambda share: share.needed_bytes - share.available_bytes)
        parts = ", ".join(f"{name} {size:,}" for name, size in too_full.parts.items() if size)
        return InsufficientVram(
            f"The model does not fit on {too_full.device}: {too_full.needed_bytes:,} bytes are "
            f"needed ({parts}), {too_full.available_bytes:,} are available. {self._advice()}",
            **self.as_dict(),
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what follows from them, in the order in which users see them."""
        verdict = {"fits": self.fits, "needed_bytes": self.needed_bytes}
        sums = {"available_bytes": self.available_bytes, "parts": self.parts}
        return {"model": self.model, "device": self.device} | verdict | sums | asdict(self)

    def as_table(self) -> str:
        """The plan for people: one row for each part, in MiB, with a bar."""
        where = ", ".join(share.device for share in self.shares)
        lines = [f"{self.model} on {where}: {self.shape}", f"  cells: {self.kv_reason}"]
        for share in self.shares:
            if len(self.shares) > 1:
                lines.append(f"  on {share.device}:")
            lines += memory_map(share)
        if self.host_parts:
            lines.append("  on the host:")
            lines += [
                f"    {name:<10}{size / _MIB:>14,.2f} MiB" for name, size in self.host_parts.items()
            ]
        if self.parts.get("states") or self.host_parts.get("states"):
            lines.append("  states: the most that kept prompts may take")
        lines.append("It fits." if self.fits else f"It does not fit. {self._advice()}")
        return "\n".join(lines)

    @property
    def shape(self) -> str:
        """The slots and the length of a sequence, in words."""
        slots = counted(self.slots, "slot") + (", each" if self.slots > 1 else "")
        text = f"{slots} up to {self.context_length:,} tokens"
        if self.capped and self.context_length < self.trained_context_length:
            text += f" (of the model's {self.trained_context_length:,}, as many as fit)"
        elif self.context_length > self.trained_context_length:
            text += f" (the model was trained for {self.trained_context_length:,})"
        return text

    def _advice(self) -> str:
        options = []
        if self.largest_context_length:
            slots = counted(self.slots, "slot")
            options.append(f"--context-length {self.largest_context_length} with {slots}")
        if self.largest_slots:
            options.append(f"--slots {self.largest_slots} with {self.context_length} tokens each")
        if not options:
            return "Not even one slot with the shortest context would fit; use a smaller model."
        return f"What would fit: {' or '.join(options)}."


def memory_map(share: Share) -> list[str]:
    """One row for each part. Each bar begins where the last one ends; all have one scale."""
    begins = accumulate(share.parts.values(), initial=0)
    rows = list(zip(share.parts, share.parts.values(), begins, strict=False))
    rows += [("needed", share.needed_bytes, 0), ("available", share.available_bytes, 0)]
    whole = max(share.needed_bytes, share.available_bytes, 1)
    return [
        f"  {name:<12}{size / _MIB:>14,.2f} MiB  {_bar(begin / whole, size / whole)}".rstrip()
        for name, size, begin in rows
    ]


def _bar(begin: float, share: float) -> str:
    """A bar, with start and length as shares of the whole; it is never too short to be seen."""
    first = round(begin * _BAR_WIDTH)
    n_cells = round((begin + share) * _BAR_WIDTH) - first
    if n_cells:
        return " " * first + "█" * n_cells
    return " " * min(first, _BAR_WIDTH - 1) + "▏" if share > 0 else ""
