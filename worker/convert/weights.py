"""Writes the weights of a conversion, directly or through llama.cpp's quantiser."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.convert import chunks
from worker.convert.output import OutputFile, check_room
from worker.convert.prepare import Conversion
from worker.convert.quantize import encode, is_copied, is_finite, to_float32
from worker.convert.report import Report
from worker.convert.tensor_plan import OutputTensor
from worker.errors import ModelError
from worker.llama import imatrix
from worker.llama.quantize import quantize

_HEADROOM_BYTES = 64 << 20
"""Disk space reserved for the header, mostly its vocabulary."""


def write_tensors(conversion: Conversion, out: OutputFile, report: Report) -> None:
    placed = out.write_header(conversion.architecture, conversion.metadata, conversion.tensors)

    def work(tensor: OutputTensor, values: npt.NDArray[Any], offset: int, _size: int) -> None:
        data = encode(values, tensor.kind)
        if not is_finite(data, tensor.kind):
            raise _not_finite(tensor, values)
        out.write(data, offset)

    step = partial(report.step, "convert")
    chunks.run(work, placed, conversion.checkpoint, step, conversion.options.n_threads)
    out.seal()


def _not_finite(tensor: OutputTensor, values: npt.NDArray[Any]) -> ModelError:
    """The error for a value that is not finite, in the source or in the type to write."""
    if is_copied(values.dtype, tensor.kind) or not np.isfinite(to_float32(values)).all():
        why = "has a NaN or an infinity in its source, with which no answer can be computed"
    else:
        wider = "f32" if tensor.kind == "BF16" else "bf16 and f32"
        why = f"has a value that {tensor.kind} cannot hold; {wider} can"
    return ModelError(f"tensor {tensor.name} {why}", tensor=tensor.name)


def write_quantised(conversion: Conversion, out: OutputFile, report: Report) -> None:
    options = conversion.options
    if options.imatrix is not None:
        _check_importance(options.imatrix, conversion.tensors)
    with OutputFile(out.path.with_name("intermediate.gguf")) as intermediate:
        write_tensors(conversion, intermediate, report)
        size = sum(tensor.size_bytes for tensor in conversion.tensors)
        report.step("quantize", 0, size)
        quantize(
            intermediate.partial,
            out.partial,
            options.format.file_type,
            options.imatrix,
            options.n_threads or chunks.n_cpus(),
            lambda done, total: report.step("quantize", size * done // total, size),
        )


def _check_importance(path: Path, tensors: Sequence[OutputTensor]) -> None:
    """Refuse a matrix that llama.cpp would silently ignore."""
    if imatrix.read(path).keys().isdisjoint(tensor.name for tensor in tensors):
        why = f"--imatrix {path} measures none of the model's tensors; it is another model's"
        raise ModelError(why, path=str(path))


def check_space(destination: Path, conversion: Conversion, what: str) -> None:
    """Raise `ModelError` if the destination's disk lacks the room that `what` needs."""
    needed = _HEADROOM_BYTES + sum(tensor.size_bytes for tensor in conversion.tensors)
    weights = sum(tensor.n_elements for tensor in conversion.tensors)
    needed += int(weights * conversion.options.format.bits_per_weight / 8)
    check_room(next(each for each in destination.absolute().parents if each.exists()), needed, what)
