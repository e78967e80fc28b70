"""The LoRA adapters that are loaded, and which of them a request has. On the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.api.http.faults import refusal
from worker.wire.adapters import Adapter, Applied, applied


class Asked(Protocol):
    """An adapter as a request lists it."""

    id: str | int
    """Its name or its number."""
    scale: float


class AdapterScales:
    def __init__(self, loaded: Sequence[Adapter]) -> None:
        self.loaded = tuple(loaded)
        self.names = tuple(adapter.name for adapter in loaded)
        self.on_request = any(not adapter.is_default for adapter in loaded)
        """Whether there is one that a request has to name."""
        self.scales = [adapter.scale if adapter.is_default else 0.0 for adapter in loaded]
        """Of each, for requests that say nothing of adapters."""

    def of(self, model: str | None, asked: Sequence[Asked] | None) -> Applied:
        """A request's own list, if it has one; else the adapter that its model names; else those
        of `scales`.

        Raises:
            InvalidRequest: one in the list is not there.
        """
        if asked is not None:
            return applied(self._listed(asked))
        if model is not None and model in self.names:
            number = self.names.index(model)
            return applied({number: self.loaded[number].scale})
        return applied(dict(enumerate(self.scales))) if self.loaded else ()

    def set(self, asked: Sequence[Asked]) -> None:
        """Set `scales`; one that is not in the list is off from now on. Raises as `of`."""
        listed = self._listed(asked)
        self.scales = [listed.get(number, 0.0) for number in range(len(self.loaded))]

    def _listed(self, asked: Sequence[Asked]) -> dict[int, float]:
        found: dict[int, float] = {}
        for place, each in enumerate(asked):
            id = each.id
            number = self.names.index(id) if id in self.names else id
            if isinstance(number, str) or not 0 <= number < len(self.loaded):
                known = " or ".join(f"{n} ({name!r})" for n, name in enumerate(self.names))
                what = f"must be {known}" if known else "names none: no adapter is loaded"
                raise refusal(f"lora[{place}].id", "unknown", what, id)
            found[number] = each.scale
        return found
