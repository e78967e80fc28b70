"""A LoRA adapter in llama.cpp: loaded beside the weights, then added in every computation."""

from __future__ import annotations

import ctypes

from worker.errors import ModelError
from worker.llama import library
from worker.llama.context import Context
from worker.llama.model import Model


class LoraAdapter:
    """
    NOTE: llama.cpp wants it loaded before the context is created; it is freed with the model.

    Raises:
        ModelError: llama.cpp refuses the file.
    """

    def __init__(self, model: Model, path: str, scale: float) -> None:
        self._flat = library.load()
        self.scale = scale
        with library.log.capture() as lines:
            self._pointer = self._flat.llama_adapter_lora_init(model.pointer, path.encode())
        # Its buffers are part of what the residency proof reads.
        model.load_log += tuple(lines)
        if not self._pointer:
            reason = lines[-1] if lines else "no reason was given"
            raise ModelError(f"llama.cpp cannot load the adapter {path}: {reason}", path=path)

    def use_in(self, context: Context) -> None:
        """Every later `decode` of the context computes with it."""
        adapters = (self._flat.llama_adapter_lora_p_ctypes * 1)(self._pointer)
        scales = (ctypes.c_float * 1)(self.scale)
        if self._flat.llama_set_adapters_lora(context.pointer, adapters, 1, scales) != 0:
            raise ModelError("llama.cpp does not take the adapter into the context")
