"""llama.cpp's quantiser, which rewrites a GGUF with smaller types.

It runs in a process of its own: native code may end its process, and the call neither returns early
nor reacts to signals. `quantize` runs in the converter and starts this module as a child. The child
writes its progress as JSON lines and dies with its parent (on Linux).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.background import die_with_parent
from worker.child_processes import how_it_ended, inherited
from worker.errors import ModelError, WorkerError
from worker.llama import imatrix, library

MAX_BUFFER_BYTES = 128 << 20
"""The most bytes of tensor rows that the quantiser keeps in memory at once."""

_PROGRESS = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")


def quantize(
    source: Path,
    target: Path,
    file_type: int,
    importance: Path | None,
    threads: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Write `target` with the mixture of types that `file_type` (a `llama_ftype`) stands for, by an
    importance matrix if there is one. `on_progress` gets the number of finished tensors and of all.

    Raises:
        ModelError: the quantiser refuses, or its process dies.
    """
    arguments = map(str, (source, target, file_type, threads, importance or ""))
    command = [sys.executable, "-m", __name__, *arguments]
    failure: dict[str, Any] | None = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=inherited()
    ) as child:
        try:
            for line in child.stdout or ():
                message = json.loads(line)
                if "error" in message:
                    failure = message
                else:
                    on_progress(message["done"], message["total"])
        finally:
            child.kill()  # This has no effect on a process that has ended.
    if failure is not None:
        raise ModelError(str(failure["error"]), **failure.get("details", {}))
    if child.returncode != 0:
        how = how_it_ended(child.returncode)
        raise ModelError(f"llama.cpp's quantiser ended on {source.name}: {how}")


def main() -> None:
    source, target, file_type, threads, importance = sys.argv[1:]
    die_with_parent()
    what = f"llama.cpp cannot quantise {Path(source).name}"
    library.on_abort(lambda why: _send(error=library.sentence_of_abort(what, why)))
    try:
        _quantize(Path(source), Path(target), int(file_type), int(threads), importance)
    except WorkerError as error:
        _send(error=error.message, details=error.details)
        sys.exit(error.exit_code)


def _send(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _quantize(source: Path, target: Path, file_type: int, threads: int, importance: str) -> None:
    flat = library.load()
    params = flat.llama_model_quantize_default_params()
    params.ftype = file_type
    params.nthread = threads
    params.max_buf_size = MAX_BUFFER_BYTES
    if importance:
        measured = imatrix.read(Path(importance))
        entries = (flat.llama_model_imatrix_data * (len(measured) + 1))()
        for entry, (name, weights) in zip(entries, measured.items(), strict=False):
            entry.name = name.encode()
            entry.data = weights.ctypes.data_as(type(entry.data))
            entry.size = weights.size
        params.imatrix = entries

    def listen(_level: str, line: str) -> None:
        if match := _PROGRESS.search(line):
            _send(done=int(match[1]), total=int(match[2]))

    library.log.listener = listen
    with library.log.capture() as lines:
        result = flat.llama_model_quantize(
            os.fsencode(source), os.fsencode(target), ctypes.byref(params)
        )
    if result != 0:
        last = next((line for line in reversed(lines) if "error" in line or "fail" in line), "")
        reason = last.rpartition("failed to quantize: ")[2].strip()
        if "iostream error" in reason:  # all that llama.cpp reports for a full disk
            free = shutil.disk_usage(target.parent).free
            reason = f"a file cannot be read or written, {target.parent} has {free:,} bytes free"
        raise ModelError(f"llama.cpp cannot quantise {source.name}: {reason}")


if __name__ == "__main__":
    main()
