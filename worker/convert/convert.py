"""The whole conversion: check everything, write, read back, give the file its name.

Runs on the main thread of the converter's own process; worker threads handle the chunks of the
weights (`chunks`).
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from worker.background import in_daemon_thread
from worker.convert import manifest, verify, weights
from worker.convert.output import OutputFile
from worker.convert.prepare import Options, prepare_checked
from worker.convert.report import Report
from worker.errors import ModelError


def convert(
    source: Path,
    destination: Path,
    options: Options,
    report: Report,
    *,
    overwrite: bool = True,
) -> dict[str, Any]:
    """Write `destination` from the checkpoint in the folder `source`; without `overwrite`, a file
    that exists by then is kept, and the conversion fails.

    Returns a summary of the file. Raises `ModelError` and leaves nothing behind.
    """
    began = time.monotonic()
    report.step("check", 0, 1)
    # Hashing has a processor to itself while token ids are compared.
    hashing = in_daemon_thread(partial(manifest.digest, source))
    options = replace(options, scratch=destination.parent)
    with closing(prepare_checked(source, options)) as conversion:
        for sentence in conversion.notes:
            report.note(sentence)
        weights.check_space(destination, conversion, f"converting to {destination.name}")
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"{destination.parent} cannot be made: {error.strerror}") from None
        quantised = options.format.tensor_type is None
        write = weights.write_quantised if quantised else weights.write_tensors
        with OutputFile(destination, overwrite=overwrite) as out:
            write(conversion, out, report)
            verify.check_tensors(conversion, out.partial, report)
            digest = hashing.result()
            out.patch(manifest.PLACEHOLDER, digest)
            out.commit()
    return {
        "path": str(destination),
        "outtype": options.outtype,
        "architecture": conversion.architecture,
        "n_tensors": len(conversion.tensors),
        "size_bytes": destination.stat().st_size,
        "source_sha256": digest,
        "seconds": round(time.monotonic() - began, 3),
    }
