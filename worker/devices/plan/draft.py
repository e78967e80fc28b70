"""What a draft model takes beside the model that it guesses for."""

from __future__ import annotations

from functools import cache

from worker.devices.plan.cells import draft_options
from worker.devices.plan.layout import Unloaded
from worker.errors import ModelError
from worker.llama import library
from worker.models.gguf.header import GgufHeader
from worker.wire.engine_settings import EngineSettings


class DraftPlanner:
    """Raises `ModelError` if llama.cpp refuses the file."""

    def __init__(
        self, header: GgufHeader, settings: EngineSettings, device: library.Device | None
    ) -> None:
        self._header, self._settings, self._on_gpu = header, settings, device is not None
        self._model = Unloaded(header, device, "draft model")
        self.needed = cache(self._needed)

    def close(self) -> None:
        self._model.close()

    def _needed(self, context_length: int) -> tuple[int, int]:
        """Bytes on the device and, beside a GPU, on the host, for sequences of that length.

        Raises `ModelError` if its memory cannot be cut back.
        """
        length = min(context_length, self._model.trained_context_length)
        layout = self._model.lay_out(draft_options(self._settings, length, threads=1))
        if not layout.cuts_anywhere:
            raise ModelError(
                f"The draft model {str(self._header.path)!r} cannot guess: its memory is recurrent "
                "or windowed, so a wrong guess could not be taken out of it. Give one whose layers "
                "all keep every token.",
                path=str(self._header.path),
            )
        computed = self._model.weight_bytes + layout.kv + layout.compute
        if not self._on_gpu:
            return computed + layout.output, 0
        return computed, self._model.weights.host_bytes + layout.host_compute + layout.output
