"""A LoRA adapter in llama.cpp: loaded beside the weights, then applied in every computation."""

from __future__ import annotations

import ctypes

from worker.errors import ModelError
from worker.llama import library
from worker.llama.context import Context
from worker.llama.model import Model


class LoraAdapter:
    """NOTE: llama.cpp requires it to be loaded before the context is created, and frees it with the
    model.

    Raises:
        ModelError: llama.cpp refuses the file.
    """

    def __init__(self, model: Model, path: str, scale: float) -> None:
        self._flat = library.load()
        self.scale = scale
        with library.log.capture() as lines:
            self._pointer = self._flat.llama_adapter_lora_init(model.pointer, path.encode())
        # The residency proof reads the lines about its buffers.
        model.load_log += tuple(lines)
        if not self._pointer:
            reason = lines[-1] if lines else "no reason was given"
            raise ModelError(f"llama.cpp cannot load the adapter {path}: {reason}", path=path)

    def use_in(self, context: Context) -> None:
        """Make every later `decode` of the context apply the adapter."""
        adapters = (self._flat.llama_adapter_lora_p_ctypes * 1)(self._pointer)
        scales = (ctypes.c_float * 1)(self.scale)
        if self._flat.llama_set_adapters_lora(context.pointer, adapters, 1, scales) != 0:
            raise ModelError("llama.cpp does not take the adapter into the context")
        if self.use_in not in context.uses:
            context.uses.append(self.use_in)
