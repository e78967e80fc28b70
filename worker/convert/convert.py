"""The conversion from beginning to end: check everything, write, read back, name the file.

Runs on the main thread of the converter's own process; the chunks of the weights are worked on by
a few threads (`chunks`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from worker.convert import chunks, k_quants, manifest, verify
from worker.convert.output import OutputFile, sizes
from worker.convert.prepare import Conversion, Options, prepare_checked
from worker.convert.progress import Reporter
from worker.convert.quantize import encode
from worker.errors import ModelError

_HEADROOM_BYTES = 64 << 20
"""For the vocabulary in the header."""


def convert(source: Path, destination: Path, options: Options, report: Reporter) -> dict[str, Any]:
    """Write `destination` from the checkpoint in the folder `source`.

    Returns what `Reporter.finished` shows. Raises `ModelError`, leaving nothing behind.
    """
    began = time.monotonic()
    if destination.is_dir():
        raise ModelError(f"{destination} is a folder; name the GGUF file to write")
    report.step("check", 0, 1)
    conversion = prepare_checked(source, options)
    try:
        for sentence in conversion.notes:
            report.note(sentence)
        _check_space(destination, conversion, options)
        digest = _write(conversion, destination, options, report, manifest.Hashing(source))
    finally:
        conversion.checkpoint.close()
    return {
        "path": str(destination),
        "outtype": options.outtype,
        "architecture": conversion.architecture,
        "n_tensors": len(conversion.tensors),
        "size_bytes": destination.stat().st_size,
        "source_sha256": digest,
        "seconds": round(time.monotonic() - began, 3),
    }


def _write(
    conversion: Conversion,
    destination: Path,
    options: Options,
    report: Reporter,
    hashing: manifest.Hashing,
) -> str:
    """Returns the digest of the source."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{destination.parent} cannot be made: {error.strerror}") from None
    with OutputFile(destination) as out:
        if options.format.tensor_type is None:
            _write_quantised(conversion, out, options, report)
        else:
            _write_tensors(conversion, out, options, report)
        verify.check_tensors(
            conversion.checkpoint,
            [tensor for tensor, _ in conversion.tensors],
            out.partial,
            lambda done, total: report.step("verify", done, total),
            n_threads=options.n_threads,
        )
        digest = hashing.result()
        out.patch(manifest.PLACEHOLDER, digest)
        out.commit()
    return digest


def _write_tensors(
    conversion: Conversion, out: OutputFile, options: Options, report: Reporter
) -> None:
    out.write_header(
        conversion.architecture,
        conversion.metadata,
        conversion.tensors,
        conversion.chat_template,
    )
    total = sum(p.size_bytes for p in out.placed)

    def work(chunk: chunks.Chunk) -> None:
        placed = chunk.placed
        values = chunk.source(conversion.checkpoint)
        out.write(encode(values, placed.kind, placed.tensor.plus), chunk.offset)

    report.step("convert", 0, total)
    chunks.run(
        work,
        chunks.chunks(out.placed),
        lambda done: report.step("convert", done, total),
        options.n_threads,
    )
    out.seal()


def _write_quantised(
    conversion: Conversion, out: OutputFile, options: Options, report: Reporter
) -> None:
    path = out.path.with_name(out.path.name + ".intermediate")
    with OutputFile(path, is_read_next=True) as intermediate:
        _write_tensors(conversion, intermediate, options, report)
        size = sum(p.size_bytes for p in intermediate.placed)
        report.step("quantize", 0, size)
        k_quants.quantize(
            intermediate.partial,
            out.partial,
            options.format.file_type,
            options.imatrix,
            options.n_threads,
            lambda done, total: report.step("quantize", size * done // total, size),
        )


def _check_space(destination: Path, conversion: Conversion, options: Options) -> None:
    weights = sum(tensor.n_elements for tensor, _ in conversion.tensors)
    needed = sum(sizes(conversion.tensors).values()) + _HEADROOM_BYTES
    needed += int(weights * options.format.bits_per_weight / 8)
    folder = destination.absolute().parent
    while not folder.exists():
        folder = folder.parent
    stats = os.statvfs(folder)
    available = stats.f_bavail * stats.f_frsize
    if available < needed:
        raise ModelError(
            f"{folder} has {available:,} bytes free, converting to {destination.name} "
            f"needs {needed:,}",
            needed_bytes=needed,
            available_bytes=available,
        )
