"""libmtmd: a projector turns parts of pictures and sounds into embeddings for the model.

The only import of its bindings; belongs to the engine process. Its input is pixels and samples:
libmtmd's decoders are not used, because one of them passes unknown formats to another program.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.errors import InferenceFailed, ModelError
from worker.llama import library
from worker.llama.draw import NotANumber
from worker.llama.model import Model

_TEXT = 0
"""The type of a chunk of tokens; others are parts of pictures and sounds."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MediaChunk:
    """A part of a picture or sound, ready to be encoded: one pass through the projector."""

    n_tokens: int
    """The number of rows of its embeddings, each with a position of its own."""
    at_once: bool
    """Whether each of its rows sees all others, so that all are computed in one micro-batch."""
    n_positions: int
    """How far it advances the position of what follows it: `n_tokens`, except with M-RoPE."""
    pointer: Any
    """The native chunk, which is freed with this one."""


Piece = tuple[int, ...] | MediaChunk
"""Tokens that the model expects around or between the parts of a picture or sound, or one part."""


class Projector:
    """Raises `ModelError` if libmtmd refuses the file, or it does not go with the model."""

    def __init__(
        self,
        model: Model,
        path: str,
        device: library.Device | None,
        threads: int,
        most_tokens: int = 0,
        line_break: npt.NDArray[np.float32] | None = None,
        pulse: memoryview | None = None,
    ) -> None:
        """`most_tokens`: a picture's most tokens if its kind takes any size; 0: libmtmd's default.
        `line_break`: the embedding between a picture's lines, if this kind has one.
        The first eight bytes of `pulse` change while a CPU encodes."""
        self._mtmd = _bindings()
        flat = library.load()
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = device is not None
        params.device = device.handle if device is not None else None
        params.print_timings = False
        params.n_threads = threads
        if most_tokens:
            params.image_max_tokens = most_tokens
        if device is None and pulse is not None:
            self._callback = params.cb_eval = _counting(pulse)  # kept alive for native code
        # Allocates the compute buffer, and logs its size, before the first picture comes.
        params.warmup = True
        with library.log.capture() as lines:
            pointer = self._mtmd.mtmd_init_from_file(os.fsencode(path), model.pointer, params)
        self.load_log: tuple[str, ...] = tuple(lines)
        if not pointer:
            raise ModelError(f"libmtmd cannot load {path}: {library.reason(lines)}", path=path)
        self.pointer = pointer
        self.sees = bool(self._mtmd.mtmd_support_vision(pointer))
        self.hears = bool(self._mtmd.mtmd_support_audio(pointer))
        self.sample_rate = int(self._mtmd.mtmd_get_audio_sample_rate(pointer))
        """Samples per second of a sound; -1 if it does not hear."""
        self.has_four_positions = bool(self._mtmd.mtmd_decode_use_mrope(pointer))
        """Whether a row has positions in time and space (M-RoPE)."""
        self._width = int(flat.llama_model_n_embd_inp(model.pointer))
        self._line_break = line_break

    def picture(self, width: int, height: int, pixels: bytes) -> list[Piece]:
        """The pieces of a picture of `width` × `height` pixels, each three bytes: red, green, blue.

        Any thread may call it.

        Raises:
            InferenceFailed: libmtmd cannot prepare it.
        """
        assert len(pixels) == 3 * width * height
        data = (ctypes.c_uint8 * len(pixels)).from_buffer_copy(pixels)
        return self._pieces(self._mtmd.mtmd_bitmap_init(width, height, data))

    def sound(self, samples: npt.NDArray[np.float32]) -> list[Piece]:
        """The pieces of a sound: (samples,) at `sample_rate`. Otherwise as `picture`."""
        data = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return self._pieces(self._mtmd.mtmd_bitmap_init_from_audio(len(samples), data))

    def _pieces(self, bitmap: Any) -> list[Piece]:
        mtmd = self._mtmd
        chunks = mtmd.mtmd_input_chunks_init()
        part = mtmd.mtmd_input_part(None, bitmap)
        parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
        try:
            with library.log.capture() as lines:
                result = mtmd.mtmd_tokenize_from_parts(self.pointer, chunks, parts, 1, False)
            if result != 0:
                raise InferenceFailed(f"libmtmd cannot prepare the input: {library.reason(lines)}")
            n_chunks = mtmd.mtmd_input_chunks_size(chunks)
            return [self._piece(mtmd.mtmd_input_chunks_get(chunks, at)) for at in range(n_chunks)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _piece(self, chunk: Any) -> Piece:
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) == _TEXT:
            n_tokens = ctypes.c_size_t()
            ids = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n_tokens))
            return tuple(ids[: n_tokens.value])
        copy = mtmd.mtmd_input_chunk_copy(chunk)
        piece = MediaChunk(
            int(mtmd.mtmd_input_chunk_get_n_tokens(copy)),
            bool(mtmd.mtmd_decode_use_non_causal(self.pointer, copy)),
            int(mtmd.mtmd_input_chunk_get_n_pos(copy)),
            copy,
        )
        weakref.finalize(piece, mtmd.mtmd_input_chunk_free, copy)
        return piece

    def encode(self, chunk: MediaChunk) -> npt.NDArray[np.float32]:
        """The embeddings of a chunk: (n_tokens, width of the model's input). On the engine thread.

        Raises:
            InferenceFailed: the projector fails; `NotANumber`: it computes infinity or NaN.
        """
        with library.log.capture() as lines:
            result = self._mtmd.mtmd_encode_chunk(self.pointer, chunk.pointer)
        if result != 0:
            raise InferenceFailed(f"the projector failed: {library.reason(lines)}")
        pointer = self._mtmd.mtmd_get_output_embd(self.pointer)
        rows = np.ctypeslib.as_array(pointer, (chunk.n_tokens, self._width)).copy()
        if not np.isfinite(rows).all() and not mend_breaks(rows, self._line_break):
            raise NotANumber("projector")
        return rows

    def positions(self, chunk: MediaChunk, first: int) -> npt.NDArray[np.int32]:
        """The positions of a chunk's rows: (1, n_tokens), or with M-RoPE (4, n_tokens), those in
        time, height and width and a row of zeros. `first` is the position of its first row."""
        n_tokens = chunk.n_tokens
        in_line = np.arange(first, first + n_tokens, dtype=np.int32)
        if not self.has_four_positions:
            return in_line[np.newaxis]
        image = self._mtmd.mtmd_input_chunk_get_tokens_image(chunk.pointer)
        if not image:  # a sound
            return np.stack([in_line, in_line, in_line, np.zeros_like(in_line)])
        found = (self._mtmd.mtmd_decoder_pos * n_tokens)()
        self._mtmd.mtmd_helper_image_get_decoder_pos(image, first, found)
        t, x, y, z = np.frombuffer(found, np.int32).reshape(n_tokens, 4).T
        return np.stack([t, y, x, z])

    def close(self) -> None:
        if self.pointer:
            self._mtmd.mtmd_free(self.pointer)
            self.pointer = None


def mend_breaks(rows: npt.NDArray[np.float32], line_break: npt.NDArray[np.float32] | None) -> bool:
    """Repair the breaks between a picture's lines. Returns whether all rows are finite then.

    libmtmd computes a break as `memory × 0 + embedding` from uninitialised memory, whose NaN and
    infinities yield NaN (`clip_graph_pixtral::build`). All other values of a break equal the
    embedding, and each line but the last ends with a break, so every break can be identified.
    """
    if line_break is None:
        return False
    is_break = ((rows == line_break) | ~np.isfinite(rows)).all(axis=1)
    line, rest = divmod(len(rows) + 1, int(is_break.sum()) + 1)
    if line == 1 or rest or not is_break[line - 1 :: line].all():
        return False
    rows[is_break] = line_break
    return bool(np.isfinite(rows).all())


def _counting(pulse: memoryview) -> Any:
    """The callback before and after each node of libmtmd's graph. With it, ggml computes node by
    node, which takes some microseconds and changes no bit of the embeddings. On a GPU, it would
    also wait for each node."""
    count = pulse.cast("q")

    def count_one(_node: int, _is_before: bool, _data: int) -> bool:
        count[0] += 1
        return True  # before a node: call again after it; after a node: go on

    return library.load().ggml_backend_sched_eval_callback(count_one)


@cache
def _bindings() -> ModuleType:
    log, what = library.log_callback(), "libmtmd, which pictures and sounds need,"
    mtmd = library.imported("mtmd_cpp", what, "install a wheel that has it")
    mtmd.mtmd_helper_log_set(log, None)  # the helpers' log and libmtmd's own
    return mtmd
