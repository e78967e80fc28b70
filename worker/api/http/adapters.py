"""The model names that requests may use: the model's own, and those of the loaded LoRA adapters.
Runs on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.api.http.faults import fault, refusal
from worker.errors import ModelNotFound
from worker.wire.adapters import Adapter, Applied, applied


class Asked(Protocol):
    """An adapter as a request lists it."""

    id: str | int
    """Its name or its index."""
    scale: float


class AdapterScales:
    def __init__(
        self, loaded: Sequence[Adapter], model_names: Sequence[str], *, is_strict: bool
    ) -> None:
        """`is_strict` refuses names outside `all_names`. So does an adapter that only applies if a
        request names it: otherwise a misspelt name would be answered without the adapter."""
        self.loaded = tuple(loaded)
        self.names = tuple(adapter.name for adapter in loaded)
        self.all_names = (*model_names, *self.names)
        """Names of the model and of its adapters, which count as model names too."""
        self._is_strict = is_strict or any(not adapter.is_default for adapter in loaded)
        self.scales = [adapter.scale if adapter.is_default else 0.0 for adapter in loaded]
        """Each adapter's scale in requests that name none."""

    def of(self, model: str | None, asked: Sequence[Asked] | None) -> Applied:
        """The adapters of a request: those that it lists, else the one that `model` names, else
        those of `scales`.

        Raises:
            ModelNotFound: the model's name is not one that this worker answers to.
            InvalidRequest: a listed adapter is not loaded.
        """
        if model is not None and self._is_strict and model not in self.all_names:
            message = f"model must be {' or '.join(map(repr, self.all_names))}"
            raise ModelNotFound(message, errors=[fault("model", "unknown", message)])
        if asked is not None:
            return applied(self._listed(asked))
        if model is not None and model in self.names:
            number = self.names.index(model)
            return applied({number: self.loaded[number].scale})
        return applied(dict(enumerate(self.scales))) if self.loaded else ()

    def set(self, asked: Sequence[Asked]) -> None:
        """Set `scales`; an adapter that is not listed gets 0. Raises `InvalidRequest` as `of`."""
        listed = self._listed(asked)
        self.scales = [listed.get(number, 0.0) for number in range(len(self.loaded))]

    def _listed(self, asked: Sequence[Asked]) -> dict[int, float]:
        found: dict[int, float] = {}
        for place, each in enumerate(asked):
            id = each.id
            number = self.names.index(id) if id in self.names else id
            if isinstance(number, str) or not 0 <= number < len(self.loaded):
                known = " or ".join(f"{n} ({name!r})" for n, name in enumerate(self.names))
                what = f"must be {known}" if known else "must not be given: no adapter is loaded"
                raise refusal(f"lora[{place}].id", "unknown", what, id)
            found[number] = each.scale
        return found
