"""Reads a written GGUF back and compares it with its source.

Every tensor is computed again, and every byte must be equal; `check_file` compares every metadata
key as well. Only llama.cpp's quantiser can reproduce its own bytes: a conversion checks that they
lose no more than is normal for the type, and `check_file` runs the quantiser again. The converter's
worker threads check the chunks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.background import in_daemon_thread
from worker.convert import chunks, manifest, weights
from worker.convert.checkpoint import read_bytes
from worker.convert.output import OutputFile, write_layout
from worker.convert.output_types import FORMATS
from worker.convert.prepare import Conversion, Options, prepare_checked
from worker.convert.quantize import decode, encode, to_float32
from worker.convert.report import Report
from worker.convert.tensor_plan import OutputTensor
from worker.errors import ModelError, of_file
from worker.models.checksum import sha256_of_range
from worker.models.gguf.header import read_header
from worker.models.gguf.layout import GgufLayout, read_layout
from worker.models.scratch import Scratch

_LOSS = {
    "Q2_K": (0.6, 15 * 4),
    "Q3_K": (0.4, 32 * 4),
    "IQ4_NL": (0.25, 127),
    "IQ4_XS": (0.25, 32 * 127),
    "Q4_0": (0.25, 8),
    "Q4_1": (0.25, 16),
    "Q4_K": (0.25, 63 * 16),
    "Q5_0": (0.15, 16),
    "Q5_1": (0.15, 32),
    "Q5_K": (0.15, 63 * 32),
    "Q6_K": (0.08, 128 * 32),
}
"""By type: the largest allowed RMS error relative to the RMS of the values, about twice that of
random weights; and the largest magnitude in a block as a multiple of its float16 scale."""
_SCALE_ERROR = 2.0**-25
"""The largest rounding error of a tiny scale: half of float16's smallest step. It allows for rows
near zero, such as the embeddings of tokens that training never saw."""
_FLAG_HINTS = {
    key: f"; {flag} must be given, or not, as it was to the conversion"
    for key, flag in (
        (Keys.General.NAME, "--name"),
        (Keys.Tokenizer.PRE, "--pre-tokenizer"),
        (manifest.IMATRIX, "--imatrix"),
    )
}
"""Hints for the keys that depend on a flag of `verify`."""
_QUANTISER_PREFIX = "quantize.imatrix."
"""The prefix of the keys that llama.cpp's quantiser adds."""


def check_file(source: Path, file: Path, options: Options, report: Report) -> int:
    """Repeat every check on an existing file; returns the number of tensors.

    Raises:
        ModelError: the file differs from a conversion of the source with these options, apart
            from the version that wrote it.
    """
    recorded = read_header(file).metadata
    outtype = recorded.get(manifest.OUTTYPE)
    if outtype not in FORMATS:
        raise ModelError(
            f"{file} was not written by llorch-convert: its metadata has "
            + (f"{manifest.OUTTYPE} {outtype!r}" if outtype else f"no {manifest.OUTTYPE}")
        )
    is_projector = recorded.get(Keys.General.TYPE) == "mmproj"
    own = file.absolute().parent
    folder = own if os.access(own, os.W_OK) else Path(tempfile.gettempdir())
    options = replace(options, outtype=str(outtype), scratch=folder, projector=is_projector)
    if manifest.IMATRIX in recorded and options.imatrix is None:
        raise ModelError(
            f"{file} was quantised with an importance matrix, which verify needs: give the file "
            f"whose SHA-256 is {recorded[manifest.IMATRIX]} with --imatrix"
        )
    hashing = in_daemon_thread(partial(manifest.digest, source))
    with closing(prepare_checked(source, options)) as conversion:
        digest = recorded.get(manifest.DIGEST)  # Compared last, as hashing takes long.
        conversion.metadata[manifest.DIGEST] = str(digest)
        writer, reader = recorded.get(manifest.VERSION), conversion.metadata[manifest.VERSION]
        if isinstance(writer, str) and writer != reader:
            report.note(f"the file was written by version {writer!r}, and checked by {reader!r}")
            conversion.metadata[manifest.VERSION] = writer
        _check_metadata(conversion, file)
        check_tensors(conversion, file, report)
        if (actual := hashing.result()) != digest:
            raise _key_differs(manifest.DIGEST, [actual], [digest])
        if options.format.tensor_type is None:
            _quantise_again(conversion, file, folder, report)
    return len(conversion.tensors)


def _check_metadata(conversion: Conversion, file: Path) -> None:
    is_quantised = conversion.options.format.tensor_type is None
    with Scratch(None) as folder, of_file(path := folder / "header.gguf"):
        write_layout(path, conversion.architecture, conversion.metadata)
        expected, found = read_layout(path), read_layout(file)
        for key in sorted(expected.types.keys() | found.types.keys()):
            wanted, got = _typed(expected, key), _typed(found, key)
            if wanted != got and not (is_quantised and key.startswith(_QUANTISER_PREFIX)):
                raise _key_differs(key, wanted, got)


def _key_differs(key: str, wanted: Sequence[object], got: Sequence[object]) -> ModelError:
    pairs = zip_longest(wanted, got, fillvalue="nothing")
    a, b = next((a, b) for a, b in pairs if a != b)
    why = f"it has {b!r:.80} instead of {a!r:.80}"
    if not got:
        why = "the file lacks it"
    if not wanted:
        why = "the source does not have it"
    return ModelError(f"verification of {key} failed: {why}{_FLAG_HINTS.get(key, '')}", key=key)


def _typed(layout: GgufLayout, key: str) -> list[object]:
    """The type and the value, of an array the item type and the items; empty without the key."""
    if key in layout.metadata:
        return [layout.types[key], layout.metadata[key]]
    if (array := layout.arrays.get(key)) is None:
        return []
    items = array.read_bytes() if array.item_type == "string" else array.read()
    return [layout.types[key], array.item_type, *items]


def _quantise_again(conversion: Conversion, file: Path, folder: Path, report: Report) -> None:
    """Quantise again in `folder`, and compare every byte of the weights with the file's.

    Raises:
        ModelError: a tensor has another type or other bytes, or the disk has no room.
    """
    target = folder / "again.gguf"
    weights.check_space(target, conversion, f"quantising again, to compare {file.name} with it,")
    with OutputFile(target) as out:
        weights.write_quantised(conversion, out, report)
        wanted = {entry.name: entry for entry in read_header(out.partial).tensors}
        for entry in read_header(file).tensors:
            other = wanted[entry.name]
            if entry.type_name != other.type_name:
                kinds = f"{entry.type_name} instead of {other.type_name}"
                raise ModelError(f"{file}: {entry.name} is of type {kinds}")
            if sha256_of_range(file, entry.offset, entry.n_bytes) != sha256_of_range(
                out.partial, other.offset, other.n_bytes
            ):
                raise _differs(entry.name, "not those that llama.cpp's quantiser writes")


def check_tensors(conversion: Conversion, path: Path, report: Report) -> None:
    """Compare each tensor with its converted source.

    Raises:
        ModelError: the file lacks a tensor, or one differs.
    """
    options = conversion.options
    placed = _placed(conversion.tensors, path, is_quantised=options.format.tensor_type is None)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def check(tensor: OutputTensor, values: npt.NDArray[Any], offset: int, size: int) -> None:
        with of_file(path):
            written = read_bytes(file, size, offset)
        if written.size < size:
            raise ModelError(f"{path} became shorter while it was verified")
        _check_rows(values, written, tensor)

    step = partial(report.step, "verify")
    try:
        chunks.run(check, placed, conversion.checkpoint, step, options.n_threads)
    finally:
        os.close(file)


def _placed(
    tensors: Sequence[OutputTensor], path: Path, *, is_quantised: bool
) -> list[OutputTensor]:
    """The tensors with their offsets in a file, and their types there if llama.cpp chose them."""
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
        if entry.type_name != tensor.kind and not is_quantised:
            kinds = f"{entry.type_name} instead of {tensor.kind}"
            raise ModelError(f"{path}: {tensor.name} is of type {kinds}")
        placed.append(replace(tensor, kind=entry.type_name, offset=entry.offset))
    end = max((t.offset + t.size_bytes for t in placed), default=0)
    if placed and (surplus := path.stat().st_size - end) >= gguf.GGUF_DEFAULT_ALIGNMENT:
        raise ModelError(f"{path} has {surplus:,} bytes after its last tensor")
    if entries:
        raise ModelError(f"{path} has tensor {min(entries)}, which does not come from the source")
    return sorted(placed, key=lambda tensor: tensor.offset)


def _check_rows(
    source: npt.NDArray[Any], written: npt.NDArray[np.uint8], tensor: OutputTensor
) -> None:
    kind = tensor.kind
    if kind not in _LOSS:
        if not np.array_equal(encode(source, kind), written):
            raise _differs(tensor.name, "not those that its source converts to")
        return
    values = to_float32(source).reshape(-1)
    lost, size = _rms(decode(written, kind) - values), _rms(values)
    share, times = _LOSS[kind]
    if not lost <= share * size + times * _SCALE_ERROR:  # False for a NaN.
        raise _differs(tensor.name, f"{kind} with an error of {lost / max(size, 1e-30):.0%}")


def _rms(values: npt.NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _differs(name: str, what: str) -> ModelError:
    return ModelError(f"verification of tensor {name} failed: its bytes are {what}", tensor=name)
