"""One llama.cpp context: the KV cache of all sequences and the compute graphs.

Belongs to the engine thread; only `abort` is thread-safe.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from worker.errors import InferenceFailed, VramOom
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.memory_kind import MemoryKind
from worker.llama.model import Model
from worker.wire.adapters import Applied
from worker.wire.engine_settings import KvType
from worker.wire.messages import DecodeOutcome

_ABORT_CALLBACK, _RUN, _ABORT = ("sem_trywait", 2**31 - 1, 0)
"""The function that native code calls after each node of a compute graph, with the address of a
counter; any result but 0 aborts. It is from libc, because a Python function would take the GIL each
time. `sem_trywait` takes 1 from a POSIX semaphore and returns 0, or -1 if the semaphore is 0. The
falling counter also shows another process that the graph makes progress, however long it takes."""
if sys.platform == "darwin":  # which has no semaphores in plain memory
    _ABORT_CALLBACK, _RUN, _ABORT = ("strlen", 0, 1)
_ABORT_BYTES = 64
"""More than a semaphore needs."""
_LEAST_LEFT = 2**30
"""The counter is reset below this number; a `decode` has far fewer nodes."""
_OUTCOMES: dict[int, DecodeOutcome] = {0: "ok", 1: "no_room", 2: "aborted"}
_LOGITS_BYTES = 64 << 20
"""The limit for all logits of one batch."""
_LEAST_ROWS = 8
"""Rows with logits that each sequence may have even beyond `_LOGITS_BYTES`."""

_COUNT_BYTES = 4
_N_PARTS = slice(8, 12)
"""Where a sequence's state holds the number of the cache's parts, after a magic number and the
sequence's number. Each part follows: the number of its cells and, unless that is 0, the cells
(`llama_kv_cache::state_write`)."""
_HEAD_BYTES = _N_PARTS.stop
_MAP_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
"""On Linux, all pages are populated at once. Faulting them in one by one takes 1.5 times as long,
and NumPy's huge pages take several times as long when none are free."""
_MAPPED_BYTES = 4 << 20
"""States from this size on are mapped, because NumPy would request huge pages for them. Smaller
ones could use up the 65,000 or so mappings that a process may have."""
_TAIL_BYTES = 256 * _COUNT_BYTES
"""Zeros at the end of each state, which serve as counts of empty parts: llama.cpp reads one for
each part of a split cache besides the sequence's own. To append them at a restore would copy the
state."""


@dataclass(frozen=True, slots=True)
class ContextOptions:
    n_ctx: int
    """KV cells of all sequences together."""
    n_seq_max: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    threads: int = 1
    kv_types: tuple[KvType, KvType] = ("f16", "f16")
    """The types of keys and of values."""
    rope: tuple[tuple[str, float], ...] = ()
    """Settings of rope and YaRN: fields of `llama_context_params` and their values."""
    kv_unified: bool = False
    flash_attention: Literal["auto", "on", "off"] = "auto"
    offload: bool = False
    """Whether the KV cache and attention are on the GPU; otherwise both are on the CPU."""
    embeddings: bool = False
    n_back: int = 0
    """How many tokens can be taken back from a recurrent state, if llama.cpp supports that for the
    model: it keeps this many more states of each sequence."""
    mtp: Literal["off", "trunk", "head"] = "off"
    """A trunk returns the hidden states of all rows. A head computes only the model's layers for
    multi-token prediction, from such states and tokens, and returns its own states of rows with
    logits."""


def rows_with_logits(n_vocab: int, n_sequences: int) -> int:
    """The most rows with logits that each sequence may have in one batch. A row has four bytes per
    token of the vocabulary. The device reserves memory for the rows of one compute graph, the host
    for those of the batch; more rows end the process."""
    return max(_LOGITS_BYTES // (4 * n_vocab * n_sequences), _LEAST_ROWS)


class Context:
    """Raises `VramOom` if llama.cpp cannot allocate the KV cache or the compute buffers."""

    def __init__(
        self, model: Model, options: ContextOptions, pulse: memoryview | None = None
    ) -> None:
        """`pulse` has 64 bytes, of which the first eight change while a CPU computes (on Linux)."""
        self._flat = library.load()
        self.model = model
        self._abort_callback = ctypes.cast(
            getattr(ctypes.CDLL(None), _ABORT_CALLBACK), self._flat.ggml_abort_callback
        )
        self._left = ctypes.c_int32.from_buffer(pulse or bytearray(_ABORT_BYTES))
        self._left.value = _RUN
        self._make(options)

    def divide(self, n_cells: int, n_slots: int, unified: bool) -> None:
        """Recreate the context with empty cells, in one pool or in `n_slots` equal parts.

        Raises `VramOom`, and stays closed, if the device no longer has the memory.
        """
        self.close()
        self._make(replace(self.options, n_ctx=n_cells, n_seq_max=n_slots, kv_unified=unified))

    def _make(self, options: ContextOptions) -> None:
        flat, model, self.options = self._flat, self.model, options
        params = _params(options, model.n_vocab)
        with library.log.capture() as lines:
            pointer = flat.llama_init_from_model(model.pointer, params)
        self.load_log: tuple[str, ...] = tuple(lines)
        if not pointer:
            raise VramOom(f"llama.cpp cannot create a context: {library.reason(lines)}")
        self.pointer = pointer
        if options.mtp != "off":
            library.hidden_states().enable(pointer, True, options.mtp == "head")
        self.n_ctx = int(flat.llama_n_ctx(pointer))
        """KV cells of all sequences together, as llama.cpp rounded them."""
        self._memory = flat.llama_get_memory(pointer)
        self._pooling = flat.llama_pooling_type(pointer)
        self.pools = self._pooling != flat.LLAMA_POOLING_TYPE_NONE
        """Whether a text has one pooled output; otherwise, each of its tokens has one."""
        self._applied: Applied = ()
        if model.directions is not None:
            self.steer(model.directions)
        self._unsettled: set[int] = set()
        """Slots with a pending copy, which the next `decode` makes."""
        self._rows: dict[int, npt.NDArray[np.float32]] = {}
        """Views of rows of logits by their address."""
        self.memory_kind = self._memory_kind()
        is_split = self.memory_kind.moves_states and not options.kv_unified
        self._n_empty_parts = options.n_seq_max - 1 if is_split else 0
        """The parts of a split cache besides a sequence's own: its state has a 0 for each."""
        flat.llama_set_abort_callback(pointer, self._abort_callback, ctypes.addressof(self._left))

    def close(self) -> None:
        if self.pointer:
            self._flat.llama_free(self.pointer)
            self.pointer = None

    # --- compute -----------------------------------------------------------------------

    def use_threads(self, n_threads: int) -> None:
        """Compute on `n_threads` threads from the next `decode` on."""
        self.options = replace(self.options, threads=n_threads)
        self._flat.llama_set_n_threads(self.pointer, n_threads, n_threads)

    def apply(self, adapters: Applied) -> None:
        """Compute with exactly these of the model's adapters from now on.

        NOTE: after a change, the next `decode` rebuilds its compute graphs, which takes
        milliseconds.
        """
        if adapters == self._applied:
            return
        flat, n = self._flat, len(adapters)
        pointers = (flat.llama_adapter_lora_p_ctypes * n)(
            *(self.model.adapters[number] for number, _ in adapters)
        )
        scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
        flat.llama_set_adapters_lora(self.pointer, pointers, n, scales)
        self._applied = adapters

    def steer(self, directions: npt.NDArray[np.float32] | None) -> None:
        """Compute with this control vector, (layers - 1, n_embd), or with none, from now on.

        Raises `VramOom` if llama.cpp cannot allocate it.
        """
        flat = self._flat
        if directions is None:
            flat.llama_set_adapter_cvec(self.pointer, None, 0, 0, 0, 0)
            return
        n_layers, n_embd = directions.shape
        data = directions.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if flat.llama_set_adapter_cvec(self.pointer, data, directions.size, n_embd, 1, n_layers):
            raise VramOom("llama.cpp cannot allocate the control vector")

    def decode(self, batch: Batch) -> DecodeOutcome:
        """Compute the batch's rows; blocks until the device is done, without holding the GIL."""
        if batch.at_once:
            self._flat.llama_set_causal_attn(self.pointer, False)
        result = self._flat.llama_decode(self.pointer, batch.native)
        if batch.at_once:
            self._flat.llama_set_causal_attn(self.pointer, True)
        self._unsettled.clear()
        if result == 0:
            self._flat.llama_synchronize(self.pointer)  # on a CPU, the decode has waited already
        if abs(self._left.value - _ABORT) < _LEAST_LEFT:
            # Rarely, so that a reader who looks only every few short passes still sees a change.
            # An abort that came while a GPU computed must not stop the next batch.
            self._left.value = _RUN
        if result == -1:
            raise InferenceFailed("llama.cpp refuses a batch as malformed")
        return _OUTCOMES.get(result, "failed")

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row that requested them: (vocabulary,), valid until the next `decode`."""
        pointer = self._flat.llama_get_logits_ith(self.pointer, row)
        address = ctypes.addressof(pointer.contents)
        view = self._rows.get(address)
        if view is None:  # cached, because making a view is slow
            shape = (self.model.n_vocab,)
            view = self._rows[address] = np.ctypeslib.as_array(pointer, shape)
        return view

    def hidden_states(self, rows: range) -> npt.NDArray[np.float32]:
        """The hidden states of consecutive rows of the batch: (rows, n_embd), valid until the next
        `decode`. For a head, `rows` is a single row that requested logits."""
        pointer = library.hidden_states().row(self.pointer, rows.start)
        return np.ctypeslib.as_array(pointer, (len(rows), self.model.n_embd))

    def pooled(self, slot: int) -> npt.NDArray[np.float32]:
        """A copy of a sequence's pooled output: shape (n_embd,), or (n_cls_out,) if it ranks."""
        pointer = self._flat.llama_get_embeddings_seq(self.pointer, slot)
        is_rank = self._pooling == self._flat.LLAMA_POOLING_TYPE_RANK
        size = self.model.n_cls_out if is_rank else self.model.n_embd
        return np.ctypeslib.as_array(pointer, (size,)).copy()

    def of_tokens(self, rows: range) -> npt.NDArray[np.float32]:
        """A copy of the outputs of these rows of the batch, (rows, n_embd), without pooling."""
        found = (self._flat.llama_get_embeddings_ith(self.pointer, row) for row in rows)
        return np.stack([np.ctypeslib.as_array(each, (self.model.n_embd,)) for each in found])

    def abort(self) -> None:
        """Make a running `decode` return `aborted`, or the next one if none is running.

        It works on CPU and Metal. A half-updated recurrent state cannot be rolled back, so a model
        with one is never aborted. Any thread may call it.
        """
        if not self.memory_kind.recurrent:
            self._left.value = _ABORT

    # --- memory ------------------------------------------------------------------------

    def _memory_kind(self) -> MemoryKind:
        window = 0
        if any("SWA KV cache" in line for line in self.load_log):
            window = int(self._flat.llama_model_n_swa(self.model.pointer))
        n_caches = sum("llama_kv_cache: size = " in line for line in self.load_log)
        # The layers for multi-token prediction have no recurrent state.
        is_recurrent = self.model.is_recurrent and self.options.mtp != "head"
        kind = MemoryKind(recurrent=is_recurrent, window=window)
        if kind.recurrent:
            kind = replace(kind, most_back=int(self._flat.llama_n_rs_seq(self.pointer)))
        return replace(kind, moves_states=kind.cuts_anywhere and n_caches == 1)

    def truncate(
        self, slot: int, length: int, snapshot: bytes | None = None, *, is_recent: bool = False
    ) -> bool:
        """Keep only the first `length` positions of a sequence. A snapshot must be of that length,
        and is restored. `is_recent`: the last pass computed the last position that stays and all
        that go.

        Returns false if the memory cannot be cut there. A cut to 0 always works.
        """
        partial = self._flat.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if snapshot is not None and not (snapshot and self._set_state(slot, snapshot, partial)):
            return False
        if length and not (is_recent or self.memory_kind.cuts_anywhere):
            n_held, first = self.last_position(slot) + 1, self.first_position(slot)
            if not self.memory_kind.can_cut(length, n_held, first):
                return False
        return bool(self._flat.llama_memory_seq_rm(self._memory, slot, length, -1))

    def copy(self, source: int, target: int, length: int, snapshot: bytes | None = None) -> bool:
        """Copy the first `length` positions of `source` to the empty sequence `target`.

        Returns false, with undefined contents in `target`, if the memory cannot be cut there. With
        a split cache, the next `decode` makes the copy; until then, `source` must not be written
        nor `target` be read.
        """
        unified, window = self.options.kv_unified, self.memory_kind.window
        if snapshot is not None and window and not unified:
            # llama.cpp's copy would wait, and then overwrite the snapshot. A state is restored at
            # once, and has all that the snapshot lacks.
            state = self.state(source, self.state_bytes(source))
            if state is None or not self.restore(target, state):
                return False
            return self.truncate(target, length, snapshot)
        if not unified:
            self._unsettled |= {source, target}
        # With a split cache, llama.cpp copies only whole streams; the rest is cut off afterwards.
        end = length if unified else -1
        self._flat.llama_memory_seq_cp(self._memory, source, target, 0, end)
        if snapshot is None and window and unified:
            # A window's cell that two sequences share is not reused while both live, and there are
            # only as many cells as the windows need. Each sequence therefore gets cells of its own.
            snapshot = self.snapshot(target)
        if snapshot is None and self.memory_kind.recurrent and self.memory_kind.most_back:
            # llama.cpp copies the newest state, even if tokens were taken back since.
            snapshot = self.snapshot(source)
        return self.truncate(target, length, snapshot)

    def snapshot(self, slot: int) -> bytes:
        """A sequence's recurrent state, or the cells of its windows; empty if llama.cpp fails, or
        the system refuses the memory."""
        partial = self._flat.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = self._flat.llama_state_seq_get_size_ext(self.pointer, slot, partial)
        try:
            content = np.empty(size, np.uint8)
            return bytes(content) if self._get_state(slot, content, partial) else b""
        except MemoryError:
            return b""

    def state_bytes(self, slot: int) -> int:
        """The size of `state` for a sequence; 0 if llama.cpp fails."""
        size = int(self._flat.llama_state_seq_get_size_ext(self.pointer, slot, 0))
        return size and size - self._n_empty_parts * _COUNT_BYTES + _TAIL_BYTES

    def state(self, slot: int, n_bytes: int) -> memoryview | None:
        """A copy of all memory of a sequence, in `n_bytes` (see `state_bytes`); `None` if llama.cpp
        fails, the system refuses the memory, or a copy of the sequence's cells is pending."""
        if slot in self._unsettled or not n_bytes:
            return None
        tail = n_bytes - _TAIL_BYTES
        size = tail + self._n_empty_parts * _COUNT_BYTES
        try:
            state = _uninitialised(size + _TAIL_BYTES)
        except (MemoryError, OSError):  # the plan does not know all limits, such as ulimit -d
            return None
        if not self._get_state(slot, np.frombuffer(state[:size], np.uint8), 0):
            return None
        if self._n_empty_parts:  # drop the counts of the parts before the slot's
            begin = slot * _COUNT_BYTES
            state[begin : begin + _HEAD_BYTES] = state[:_HEAD_BYTES]
            state = state[begin:]
        state = state[:n_bytes]
        state[tail:] = bytes(_TAIL_BYTES)
        return state

    def restore(self, slot: int, state: memoryview) -> bool:
        """Put a state into an empty sequence. Returns false, and leaves the sequence empty, if it
        does not fit or a copy of the sequence's cells is pending. Changes the state's head."""
        n_empty = self._n_empty_parts
        if self.memory_kind.moves_states:
            state[_N_PARTS] = (1 + n_empty).to_bytes(_COUNT_BYTES, sys.byteorder)
        size = len(state) - _TAIL_BYTES + n_empty * _COUNT_BYTES
        fits = slot not in self._unsettled and self._set_state(slot, state[:size], 0)
        if not fits:
            self.truncate(slot, 0)
        return fits

    def _get_state(self, slot: int, content: npt.NDArray[np.uint8], flags: int) -> bool:
        """Fill `content` with the state; returns whether llama.cpp wrote exactly its size."""
        pointer, size = content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(content)
        written = self._flat.llama_state_seq_get_data_ext(self.pointer, pointer, size, slot, flags)
        return bool(written == size)

    def _set_state(self, slot: int, state: bytes | memoryview, flags: int) -> bool:
        content = np.frombuffer(state, np.uint8)
        pointer, size = content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(content)
        read = self._flat.llama_state_seq_set_data_ext(self.pointer, pointer, size, slot, flags)
        return bool(read == size)

    def first_position(self, slot: int) -> int:
        """The first position of a sequence that all layers hold; -1 if there is none."""
        return int(self._flat.llama_memory_seq_pos_min(self._memory, slot))

    def last_position(self, slot: int) -> int:
        """The largest position in a sequence; -1 if it is empty."""
        return int(self._flat.llama_memory_seq_pos_max(self._memory, slot))

    def clear(self, *, zero: bool = False) -> None:
        """Free all cells. `zero` also overwrites their contents, as masks let NaN through."""
        self._flat.llama_memory_clear(self._memory, zero)


def _params(options: ContextOptions, n_vocab: int) -> Any:
    """llama.cpp's parameters of a context."""
    flat = library.load()
    params = flat.llama_context_default_params()
    params.n_ctx = options.n_ctx
    params.n_seq_max = options.n_seq_max
    params.n_batch, params.n_ubatch = options.n_batch, options.n_ubatch
    params.n_threads = params.n_threads_batch = options.threads
    numbers = library.type_numbers()
    params.type_k, params.type_v = (numbers[each.upper()] for each in options.kv_types)
    for name, value in options.rope:
        setattr(params, name, value)
    params.kv_unified = options.kv_unified
    if not options.embeddings:  # a pooled output needs all rows
        rows = options.n_seq_max * rows_with_logits(n_vocab, options.n_seq_max)
        params.n_outputs_max = min(options.n_batch, rows)
    params.n_rs_seq = options.n_back
    if options.mtp == "head":
        params.ctx_type = flat.LLAMA_CONTEXT_TYPE_MTP
    params.swa_full = False  # layers with a window keep only the window's cells
    params.flash_attn_type = {
        "auto": flat.LLAMA_FLASH_ATTN_TYPE_AUTO,
        "on": flat.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        "off": flat.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    }[options.flash_attention]
    params.offload_kqv = options.offload
    # Operations on host tensors stay on the host; llama.cpp must not move them to the device.
    params.op_offload = False
    params.embeddings = options.embeddings
    params.no_perf = True
    return params


def _uninitialised(n_bytes: int) -> memoryview:
    """Uninitialised memory; the caller overwrites all of it."""
    if n_bytes < _MAPPED_BYTES:
        return np.empty(n_bytes, np.uint8).data
    return memoryview(mmap.mmap(-1, n_bytes, flags=_MAP_FLAGS))
