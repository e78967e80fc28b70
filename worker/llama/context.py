"""One llama.cpp context: the KV cache of all sequences and the compute graphs.

Owned by the engine thread; nothing in it is thread-safe but `abort`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from worker.errors import VramOom
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.model import Model
from worker.messages import DecodeOutcome

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
"""ggml type numbers of the KV cache."""


@dataclass(frozen=True, slots=True)
class ContextOptions:
    n_ctx: int
    """KV cells of all sequences together."""
    n_seq_max: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    threads: int = 1
    kv_type: Literal["f16", "q8_0", "f32"] = "f16"
    kv_unified: bool = False
    flash_attention: Literal["auto", "on", "off"] = "auto"
    offload: bool = False
    """KV cache and attention on the GPU; false keeps both on the CPU."""
    embeddings: bool = False


class Context:
    """
    Raises:
        VramOom: llama.cpp cannot allocate the KV cache or the compute buffers.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        flat = self._flat = library.load()
        self.model, self.options = model, options
        params = flat.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_seq_max = options.n_seq_max
        params.n_batch, params.n_ubatch = options.n_batch, options.n_ubatch
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k = params.type_v = KV_TYPES[options.kv_type]
        params.kv_unified = options.kv_unified
        params.flash_attn_type = {
            "auto": flat.LLAMA_FLASH_ATTN_TYPE_AUTO,
            "on": flat.LLAMA_FLASH_ATTN_TYPE_ENABLED,
            "off": flat.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        }[options.flash_attention]
        params.offload_kqv = options.offload
        # A host tensor's work is never sent to a device behind our back, nor the other way.
        params.op_offload = False
        params.embeddings = options.embeddings
        params.no_perf = True
        with library.log.capture() as lines:
            pointer = flat.llama_init_from_model(model.pointer, params)
        self.load_log: tuple[str, ...] = tuple(lines)
        if not pointer:
            reason = lines[-1] if lines else "no reason was given"
            raise VramOom(f"llama.cpp cannot create a context: {reason}")
        self.pointer = pointer
        self._memory = flat.llama_get_memory(pointer)
        self._abort = ctypes.create_string_buffer(b"\0\0")
        # The native code asks this before each graph node. A Python callback would take the GIL
        # hundreds of times a step; libc's `strlen` over a flag byte answers the same question:
        # zero while the byte is NUL, non-zero when it is set.
        self._is_aborted = ctypes.cast(ctypes.CDLL(None).strlen, flat.ggml_abort_callback)
        flat.llama_set_abort_callback(
            pointer, self._is_aborted, ctypes.cast(self._abort, ctypes.c_void_p)
        )

    def close(self) -> None:
        if self.pointer:
            self._flat.llama_free(self.pointer)
            self.pointer = None

    @property
    def n_ctx(self) -> int:
        """KV cells of all sequences together, as llama.cpp rounded them."""
        return int(self._flat.llama_n_ctx(self.pointer))

    # --- compute -----------------------------------------------------------------------

    def decode(self, batch: Batch) -> DecodeOutcome:
        """Compute the batch's rows; blocks for the whole computation, without the GIL."""
        result = self._flat.llama_decode(self.pointer, batch.native)
        if result == 0:
            return "ok"
        if result == 1:
            return "no_room"
        if result == 2:
            return "aborted"
        assert result != -1, "llama.cpp refuses the batch as malformed"
        return "failed"

    def synchronize(self) -> None:
        """Wait for the device; on the CPU `decode` has already waited."""
        self._flat.llama_synchronize(self.pointer)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row that asked for them: shape (vocabulary,), valid until `decode`."""
        pointer = self._flat.llama_get_logits_ith(self.pointer, row)
        return np.ctypeslib.as_array(pointer, (self.model.n_vocab,))

    def embedding(self, slot: int) -> npt.NDArray[np.float32]:
        """The pooled embedding of a sequence: shape (n_embd,), a copy."""
        pointer = self._flat.llama_get_embeddings_seq(self.pointer, slot)
        return np.ctypeslib.as_array(pointer, (self.model.n_embd,)).copy()

    @property
    def pooling(self) -> int:
        return int(self._flat.llama_pooling_type(self.pointer))

    def abort(self) -> None:
        """Make a running `decode` return `aborted` (CPU and Metal); callable from any thread."""
        self._abort[0] = b"\1"

    def resume(self) -> None:
        """Take `abort` back."""
        self._abort[0] = b"\0"

    # --- memory ------------------------------------------------------------------------

    def truncate(self, slot: int, length: int) -> bool:
        """Keep the first `length` positions of a sequence; false where state cannot be cut."""
        return bool(self._flat.llama_memory_seq_rm(self._memory, slot, length, -1))

    def copy(self, source: int, target: int, length: int) -> None:
        """Give the empty sequence `target` the first `length` positions of `source`."""
        # With a split cache llama.cpp copies whole streams only, so the rest is cut off after.
        end = length if self.options.kv_unified else -1
        self._flat.llama_memory_seq_cp(self._memory, source, target, 0, end)
        if not self.options.kv_unified:
            self.truncate(target, length)

    def last_position(self, slot: int) -> int:
        """The largest position in a sequence, -1 when it is empty."""
        return int(self._flat.llama_memory_seq_pos_max(self._memory, slot))

    def clear(self) -> None:
        """Empty the whole cache."""
        self._flat.llama_memory_clear(self._memory, False)
