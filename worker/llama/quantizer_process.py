"""K-quants and Q4_0: runs llama.cpp's quantiser on an intermediate file, in a process of its own.

`quantize` runs in the converter and starts this module as a child. The child writes its progress as
JSON lines and dies with its parent (on Linux).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.background import die_with_parent
from worker.errors import ModelError, WorkerError


def quantize(
    source: Path,
    target: Path,
    file_type: int,
    imatrix: Path | None,
    threads: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Quantise a GGUF; `file_type` is llama.cpp's number.

    Raises:
        ModelError: the quantiser refuses, or its process dies.
    """
    arguments = map(str, (source, target, file_type, threads, imatrix or ""))
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    failure: dict[str, Any] | None = None
    try:
        assert child.stdout is not None
        for line in child.stdout:
            message = json.loads(line)
            if "error" in message:
                failure = message
            else:
                on_progress(message["done"], message["total"])
    finally:
        child.kill()  # This has no effect on a process that has ended.
        code = child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if failure is not None:
        raise ModelError(str(failure["error"]), **failure.get("details", {}))
    if code != 0:
        raise ModelError(f"llama.cpp's quantiser ended with code {code} on {source.name}")


def main() -> None:
    source, target, file_type, threads, imatrix = sys.argv[1:]
    die_with_parent()

    def send(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    try:
        from worker.llama.imatrix import read
        from worker.llama.quantize import quantize as quantize_here

        quantize_here(
            Path(source),
            Path(target),
            int(file_type),
            threads=int(threads),
            importance=read(Path(imatrix)) if imatrix else None,
            on_progress=lambda done, total: send(done=done, total=total),
        )
    except WorkerError as error:
        send(error=error.message, details=error.details)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
