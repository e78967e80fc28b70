"""Reads a written GGUF back and compares every tensor with its source.

The place and type of each tensor come from the file's own header. Copied values must have the same
bits; rounded values must lie within the error of their type. The converter's worker threads check
the chunks.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from worker.convert import chunks, manifest, verify_metadata, weights
from worker.convert.checkpoint import Checkpoint
from worker.convert.chunks import RowChunk
from worker.convert.direct import DirectFile
from worker.convert.output import OutputFile, PlacedTensor
from worker.convert.output_types import FORMATS
from worker.convert.prepare import Conversion, Options, check_tokens, prepare
from worker.convert.progress import Reporter
from worker.convert.quantize import (
    Q8_BLOCK,
    Q8_BLOCK_BYTES,
    TensorType,
    bf16_as_f16,
    bf16_to_f16,
    block_maximum,
    decode,
    encode,
    is_copied,
    to_float32,
)
from worker.convert.tensor_plan import OutputTensor
from worker.convert.tokenizer.check import TokenCheck
from worker.errors import ModelError
from worker.models.gguf.header import read_header
from worker.models.gguf.tensors import TensorEntry

_LEAST_NORMAL = np.float32(2.0**-14)
"""The smallest normal float16."""
_RELATIVE_RMS = {
    "Q2_K": 0.6,
    "Q3_K": 0.4,
    "Q4_0": 0.25,
    "Q4_1": 0.25,
    "Q4_K": 0.25,
    "Q5_0": 0.15,
    "Q5_1": 0.15,
    "Q5_K": 0.15,
    "Q6_K": 0.08,
}
"""The largest allowed RMS of the error relative to that of the values: about twice what random
weights give."""


def check_file(source: Path, file: Path, options: Options, report: Reporter) -> int:
    """Repeat every check on an existing file; returns the number of tensors.

    Raises:
        ModelError: the file differs from what the source gives with these options.
    """
    recorded = read_header(file).metadata
    outtype = recorded.get(manifest.OUTTYPE)
    if outtype not in FORMATS:
        raise ModelError(
            f"{file} does not say what it was converted to: {manifest.OUTTYPE} is {outtype!r}"
        )
    options = replace(options, outtype=str(outtype))
    if manifest.IMATRIX in recorded and options.imatrix is None:
        raise ModelError(
            f"{file} was quantised with an importance matrix, which verify needs: give the file "
            f"whose SHA-256 is {recorded[manifest.IMATRIX]} with --imatrix"
        )
    conversion = prepare(source, options)
    try:
        conversion.metadata[manifest.DIGEST] = manifest.digest(source)
        verify_metadata.check_metadata(conversion, file, options)
        kinds = {tensor.name: kind for tensor, kind in conversion.tensors}
        check_tensors(
            conversion.checkpoint,
            [tensor for tensor, _ in conversion.tensors],
            file,
            lambda done, total: report.step("verify", done, total),
            kinds=kinds if options.format.tensor_type else None,
        )
        if options.format.tensor_type is None:
            _quantise_again(conversion, file, options, report)
        with TokenCheck(source) as tokens:
            check_tokens(tokens, conversion)
        verify_metadata.check_key(manifest.DIFFERENCE, conversion, file)
    finally:
        conversion.checkpoint.close()
    return len(conversion.tensors)


def _quantise_again(conversion: Conversion, file: Path, options: Options, report: Reporter) -> None:
    """Quantise again, and compare every byte of the weights with the file's.

    Raises:
        ModelError: a tensor has another type or other bytes, or the disk has no room.
    """
    own = file.absolute().parent
    folder = own if os.access(own, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".llorch-verify-", dir=folder) as temporary:
        target = Path(temporary) / "again.gguf"
        weights.check_space(target, conversion, options)
        with OutputFile(target) as out:
            weights.write_quantised(conversion, out, options, report)
            wanted = {entry.name: entry for entry in read_header(out.partial).tensors}
            with out.partial.open("rb") as again, file.open("rb") as written:
                for entry in read_header(file).tensors:
                    other = wanted[entry.name]
                    if entry.type_name != other.type_name:
                        kinds = f"{entry.type_name} instead of {other.type_name}"
                        raise ModelError(f"{file}: {entry.name} is of type {kinds}")
                    if _digest(written, entry) != _digest(again, other):
                        raise ModelError(
                            f"verification of tensor {entry.name} failed: its bytes are not those "
                            "that llama.cpp's quantiser gives",
                            tensor=entry.name,
                        )


def _digest(file: BinaryIO, entry: TensorEntry) -> bytes:
    digest, rest = hashlib.sha256(), entry.n_bytes
    file.seek(entry.offset)
    while rest and (block := file.read(min(rest, 1 << 20))):
        digest.update(block)
        rest -= len(block)
    return digest.digest()


def check_tensors(
    checkpoint: Checkpoint,
    tensors: Sequence[OutputTensor],
    path: Path,
    on_done: Callable[[int, int], None],
    *,
    n_threads: int | None = None,
    kinds: Mapping[str, TensorType] | None = None,
) -> None:
    """Compare each tensor with its source.

    With `kinds`, tensors must have these types and exactly the bytes that the converter writes.

    Raises:
        ModelError: the file lacks a tensor, or one differs from its source.
    """
    placed = _placed(tensors, path)
    for p in placed:
        if kinds is not None and p.kind != kinds[p.tensor.name]:
            wanted = kinds[p.tensor.name]
            raise ModelError(f"{path}: {p.tensor.name} is of type {p.kind} instead of {wanted}")
    total = sum(p.size_bytes for p in placed)
    file = DirectFile(path, os.O_RDONLY)

    def check(chunk: RowChunk) -> None:
        written = file.read(chunk.size_bytes, chunk.offset)
        if written.size < chunk.size_bytes:
            raise ModelError(f"{path} became shorter while it was verified")
        source = chunk.source(checkpoint)
        _check_chunk(source, written, chunk)
        if kinds is not None:
            again = encode(source, chunk.placed.kind, chunk.placed.tensor.plus)
            if not np.array_equal(again, written):
                raise _differs(chunk, "its bytes are not those that the source gives")

    try:
        on_done(0, total)
        chunks.run(check, chunks.chunks(placed), lambda done: on_done(done, total), n_threads)
    finally:
        file.close()


def _placed(tensors: Sequence[OutputTensor], path: Path) -> list[PlacedTensor]:
    entries = {entry.name: entry for entry in read_header(path).tensors}
    placed = []
    for tensor in tensors:
        entry = entries.pop(tensor.name, None)
        if entry is None:
            raise ModelError(f"{path} lacks tensor {tensor.name}", tensor=tensor.name)
        # GGUF drops leading dimensions of one.
        shape, wanted = list(reversed(entry.shape)), list(tensor.shape)
        if [n for n in shape if n > 1] != [n for n in wanted if n > 1]:
            raise ModelError(f"{path}: {tensor.name} has shape {shape} instead of {wanted}")
        placed.append(PlacedTensor(tensor, entry.type_name, entry.offset, entry.n_bytes))
    if entries:
        raise ModelError(f"{path} has tensor {min(entries)}, which its source does not give")
    return sorted(placed, key=lambda p: p.offset)


def _check_chunk(source: npt.NDArray[Any], written: npt.NDArray[np.uint8], chunk: RowChunk) -> None:
    tensor, kind = chunk.placed.tensor, chunk.placed.kind
    if kind == "F32" or (is_copied(source.dtype, kind) and not tensor.plus):
        if not np.array_equal(encode(source, kind, tensor.plus), written):
            raise _differs(chunk, "its bytes are not those of the source")
        return
    if kind == "F16" and source.dtype == np.uint16 and not tensor.plus:
        expected = bf16_to_f16(source.reshape(-1), _proven_f16())
        if np.array_equal(expected, written.view(np.uint16)):
            return
    if tensor.plus:
        source = to_float32(source) + np.float32(tensor.plus)
    source = source.reshape(-1)
    if kind != "Q8_0" or not _is_near_q8_0(source, written):
        _check_values(chunk, source, decode(written, kind).reshape(-1))


def _is_near_q8_0(source: npt.NDArray[Any], written: npt.NDArray[np.uint8]) -> bool:
    """Whether blocks hold the values to half a step, in less time than the exact bound takes.

    In a block with a normal float16 scale, the largest value is 127 steps, the scale is right to
    2**-11, and each value is then within half a step and 127 * 2**-11 of one. False also where a
    scale is not normal.
    """
    blocks = written.reshape(-1, Q8_BLOCK_BYTES)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if not bool((scale >= _LEAST_NORMAL).all() and np.isfinite(scale).all()):
        return False
    whole = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    # Eight values in a word, and by columns: NumPy is slow along short axes.
    words = ((whole == 127) | (whole == -127)).view(np.uint64)
    has_largest = words[:, 0] | words[:, 1] | words[:, 2] | words[:, 3]
    values = to_float32(source).reshape(-1, Q8_BLOCK)
    steps = np.multiply(values, 1 / scale, out=None if source.dtype == np.float32 else values)
    steps -= whole
    np.abs(steps, out=steps)
    return bool(has_largest.all() and steps.max() <= 0.5 + 127 * 2.0**-11)


def _check_values(
    chunk: RowChunk, source: npt.NDArray[Any], decoded: npt.NDArray[np.float32]
) -> None:
    kind = chunk.placed.kind
    values = to_float32(source)
    error = np.subtract(decoded, values, out=decoded)
    if kind in _RELATIVE_RMS:
        share = _rms(error) / max(_rms(values), 1e-30)
        if not share <= _RELATIVE_RMS[kind]:  # False for a NaN.
            raise _differs(chunk, f"{kind} lost {share:.0%} of it")
        return
    np.abs(error, out=error)
    if kind == "Q8_0":
        within = error.reshape(-1, Q8_BLOCK) <= _q8_0_bound(source)[:, None]
    else:
        within = error <= _bound(values, kind)
    if not bool(within.all()):
        worst = int(np.argmin(within.reshape(-1)))
        raise _differs(chunk, f"the value {values[worst]} cannot be held by {kind}")


def _rms(values: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _q8_0_bound(source: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The largest error in each block: half a step of the scale, and the scale's own rounding to
    float16."""
    return block_maximum(source) * np.float32(0.5 / 127 + 2.0**-10) + np.float32(127 * 2.0**-24)


def _bound(values: npt.NDArray[np.float32], kind: TensorType) -> npt.NDArray[np.float32]:
    """The largest error of each value."""
    magnitudes = np.abs(values)
    if kind == "F16":
        # The last term is half the smallest subnormal number.
        return magnitudes * np.float32(2.0**-11) + np.float32(2.0**-25)
    return magnitudes * np.float32(2.0**-8) + np.float32(2.0**-133)


@cache
def _proven_f16() -> npt.NDArray[np.uint16]:
    """The F16 of every BF16 that F16 holds within the bound; a wrong value for all others."""
    values = to_float32(np.arange(1 << 16, dtype=np.uint16))
    table = bf16_as_f16()
    with np.errstate(invalid="ignore"):
        error = np.abs(decode(table.view(np.uint8), "F16") - values)
        within = error <= _bound(values, "F16")
    return np.where(within, table, ~table)


def _differs(chunk: RowChunk, what: str) -> ModelError:
    name = chunk.placed.tensor.name
    return ModelError(f"verification of tensor {name} failed: {what}", tensor=name)
