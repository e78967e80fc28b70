"""A memory plan as a value: its parts, its verdict and its presentation.

Frozen data, so it may cross threads and processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import msgspec

from worker.devices.plan.cells import STATES_AT_ONCE
from worker.errors import InsufficientVram

_MIB = 1 << 20
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: str
    device: str
    available_bytes: int
    """Bytes free on the device now; for a CPU, what the host or the control group leaves."""
    parts: Mapping[str, int]
    """Bytes on the device: `weights`, `kv`, `compute`, `output`, `margin`, and what else
    there is: `states`, `kv_store`, `draft`, `projector`, `embeddings`."""
    host_parts: Mapping[str, int]
    """Bytes that a GPU worker needs on the host."""
    mapped_beside_bytes: int
    """Bytes of the mapped file in addition to `weights`, which the system drops if need be."""
    context_length: int
    """The most tokens of one sequence."""
    trained_context_length: int
    capped: bool = False
    """Whether there are fewer cells than by default, because those would not fit."""
    slots: int
    kv_cells: int
    """KV cells of all sequences together."""
    kv_unified: bool
    """Whether the sequences share the cells; otherwise each slot has an equal part."""
    kv_divisions: tuple[int, ...] = ()
    """The numbers of parts into which the shared cells are divided while every sequence fits into
    one, the best first."""
    kv_reason: str
    """The choice of the KV cache, in words."""
    largest_context_length: int | None = None
    """The largest that fits with these slots; set if the plan does not fit, 0 if none does."""
    largest_slots: int | None = None
    """As the above, for the slots with this context length."""

    @property
    def needed_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def memory_bytes(self) -> int:
        """For states that requests may go on from. With a store, one of the states that it needs
        is among them; the other is being read."""
        states, stored = (
            self.parts.get(part, 0) + self.host_parts.get(part, 0)
            for part in ("states", "kv_store")
        )
        return states + stored // STATES_AT_ONCE

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.available_bytes

    def refusal(self) -> InsufficientVram:
        """The error for a plan that does not fit, with the sizes that would."""
        parts = ", ".join(f"{name} {size:,}" for name, size in self.parts.items() if size)
        return InsufficientVram(
            f"The model does not fit on {self.device}: {self.needed_bytes:,} bytes are needed "
            f"({parts}), {self.available_bytes:,} are available. {self._advice()}",
            **self.as_dict(),
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields, and what follows from them, in the order in which users see them."""
        verdict = {"fits": self.fits, "needed_bytes": self.needed_bytes}
        return {"model": self.model, "device": self.device} | verdict | asdict(self)

    @classmethod
    def from_dict(cls, shown: Mapping[str, Any]) -> Plan:
        """The plan that `as_dict` described, such as in the details of a refusal."""
        return msgspec.convert(shown, cls)

    def as_table(self) -> str:
        """The plan for people: one row for each part, in MiB, with its bar."""
        sharing = "share" if self.kv_unified else "×"
        shared = f"{self.kv_cells:,} cells, each up to " if self.kv_unified else ""
        shape = f"{self.slots} slots {sharing} {shared}{self._length_sentence()}"
        lines = [f"{self.model} on {self.device}: {shape}"]
        lines += self.memory_map()
        if self.host_parts:
            lines.append("  on the host:")
            lines += [
                f"    {name:<10}{size / _MIB:>14,.2f} MiB" for name, size in self.host_parts.items()
            ]
        if self.mapped_beside_bytes:
            size = self.mapped_beside_bytes / _MIB
            lines.append(f"  (and up to {size:,.2f} MiB of the mapped file, which gives way)")
        lines.append("It fits." if self.fits else f"It does not fit. {self._advice()}")
        return "\n".join(lines)

    def memory_map(self) -> list[str]:
        """One row for each part. Each bar begins where the last one ends; all have one scale."""
        begins = accumulate(self.parts.values(), initial=0)
        rows = list(zip(self.parts, self.parts.values(), begins, strict=False))
        rows += [("needed", self.needed_bytes, 0), ("available", self.available_bytes, 0)]
        whole = max(self.needed_bytes, self.available_bytes, 1)
        return [
            f"  {name:<12}{size / _MIB:>14,.2f} MiB  {_bar(begin / whole, size / whole)}".rstrip()
            for name, size, begin in rows
        ]

    def _length_sentence(self) -> str:
        text = f"{self.context_length:,} tokens"
        if self.capped and self.context_length < self.trained_context_length:
            text += f" (of the model's {self.trained_context_length:,}, as many as fit)"
        return text

    def _advice(self) -> str:
        options = []
        if self.largest_context_length:
            options.append(
                f"--context-length {self.largest_context_length} with {self.slots} slots"
            )
        if self.largest_slots:
            options.append(f"--slots {self.largest_slots} with {self.context_length} tokens each")
        if not options:
            return "Not even one slot with the shortest context would fit; use a smaller model."
        return f"What would fit: {' or '.join(options)}."


def _bar(begin: float, share: float) -> str:
    """A bar, with beginning and length as shares of the whole; it is never too short to be seen."""
    first = round(begin * _BAR_WIDTH)
    n_cells = round((begin + share) * _BAR_WIDTH) - first
    if n_cells:
        return " " * first + "█" * n_cells
    return " " * min(first, _BAR_WIDTH - 1) + "▏" if share > 0 else ""
