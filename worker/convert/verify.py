"""Reads a written GGUF back and compares every tensor with what its source gives.

The place and type of each tensor come from the file's own header, its source is read once more, and
every byte must be the one that the values of the source have in that type. The bytes of K-quants
are known only to llama.cpp's quantiser: a conversion checks that they lose no more than the type
does, and `check_file` lets the quantiser make them again. The converter's worker threads check the
chunks.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from worker.convert import chunks, manifest, verify_metadata, weights
from worker.convert.chunks import RowChunk
from worker.convert.direct import DirectFile
from worker.convert.output import OutputFile, PlacedTensor
from worker.convert.output_types import FORMATS
from worker.convert.prepare import Conversion, Options, check_tokens, prepare
from worker.convert.progress import Reporter
from worker.convert.quantize import decode, encode, to_float32
from worker.convert.tensor_plan import OutputTensor
from worker.convert.tokenizer.check import TokenCheck
from worker.errors import ModelError
from worker.models.gguf.header import read_header
from worker.models.gguf.tensors import TensorEntry

_LOSS = {
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
    options = replace(options, outtype=str(outtype), scratch=file.parent)
    if manifest.IMATRIX in recorded and options.imatrix is None:
        raise ModelError(
            f"{file} was quantised with an importance matrix, which verify needs: give the file "
            f"whose SHA-256 is {recorded[manifest.IMATRIX]} with --imatrix"
        )
    conversion = prepare(source, options)
    try:
        conversion.metadata[manifest.DIGEST] = manifest.digest(source)
        verify_metadata.check_metadata(conversion, file, options)
        check_tensors(
            conversion,
            file,
            options,
            lambda done, total: report.step("verify", done, total),
        )
        if options.format.tensor_type is None:
            _quantise_again(conversion, file, options, report)
        with TokenCheck(source) as tokens:
            check_tokens(tokens, conversion)
        verify_metadata.check_key(manifest.DIFFERENCE, conversion, file)
    finally:
        conversion.close()
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
    conversion: Conversion, path: Path, options: Options, on_done: Callable[[int, int], None]
) -> None:
    """Compare each tensor with what its source gives.

    Raises:
        ModelError: the file lacks a tensor, or one differs.
    """
    placed = _placed([tensor for tensor, _ in conversion.tensors], path)
    wanted = {tensor.name: kind for tensor, kind in conversion.tensors}
    for p in placed:
        if options.format.tensor_type is not None and p.kind != wanted[p.tensor.name]:
            kinds = f"{p.kind} instead of {wanted[p.tensor.name]}"
            raise ModelError(f"{path}: {p.tensor.name} is of type {kinds}")
    total = sum(p.size_bytes for p in placed)
    file = DirectFile(path, os.O_RDONLY)

    def check(chunk: RowChunk) -> None:
        written = file.read(chunk.size_bytes, chunk.offset)
        if written.size < chunk.size_bytes:
            raise ModelError(f"{path} became shorter while it was verified")
        _check_chunk(chunk.source(conversion.checkpoint), written, chunk)

    try:
        on_done(0, total)
        chunks.run(
            check, chunks.chunks(placed), lambda done: on_done(done, total), options.n_threads
        )
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
    kind = chunk.placed.kind
    if kind not in _LOSS:
        if not np.array_equal(encode(source, kind), written):
            raise _differs(chunk, "its bytes are not those that the source gives")
        return
    values = to_float32(source).reshape(-1)
    lost = _rms(decode(written, kind) - values) / max(_rms(values), 1e-30)
    if not lost <= _LOSS[kind]:  # False for a NaN.
        raise _differs(chunk, f"{kind} lost {lost:.0%} of it")


def _rms(values: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _differs(chunk: RowChunk, what: str) -> ModelError:
    name = chunk.placed.tensor.name
    return ModelError(f"verification of tensor {name} failed: {what}", tensor=name)
