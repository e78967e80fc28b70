"""The environment that child processes inherit, and how they ended. Used in all processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import worker

_SECRET = re.compile(
    "(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_(PASS|PWD|PAT|AUTH|CREDENTIAL))S?(_|$)",
    re.IGNORECASE,
)
"""Matches names such as `HF_TOKEN`, `MYSQL_PWD` and `AWS_SECRET_ACCESS_KEY`, but not `PWD` and
`TOKENIZERS_PARALLELISM`."""
_WITH_PASSWORD = re.compile("://[^/?#]*@")
"""Matches a URL with a user or password, such as a proxy's."""


def inherited() -> dict[str, str]:
    """The environment without secrets, for a process that a model's file might take over."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not _SECRET.search(name) and not _WITH_PASSWORD.search(value)
    }
    # Landlock binds only later threads, and NumPy would start one per core at its import.
    return kept | {"OPENBLAS_NUM_THREADS": "1"}


_OF_THE_SYSTEM = {
    *("PATH", "HOME", "USER", "LANG", "LANGUAGE", "LOCPATH", "LOCALE_ARCHIVE", "TZ", "TZDIR"),
    *("TMPDIR", "TMP", "TEMP", "VIRTUAL_ENV", "TERM", "NO_COLOR"),
}
"""Variables of the system and of the terminal that an engine inherits."""
_OF_LIBRARIES = (
    *("LC_", "XDG_", "PYTHON", "NPY_", "RUST_", "LD_", "DYLD_", "MALLOC_", "GLIBC_", "GCONV_"),
    *("ASAN_", "LSAN_", "TSAN_", "UBSAN_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("VECLIB_", "GGML_", "LLAMA_", "MTMD_", "CUDA_", "CUBLAS", "NVIDIA_", "NCCL_", "__NV_"),
    *("__GL_", "MTL_", "METAL_", "VK_", "MESA_", "GALLIUM_", "NIR_", "LP_", "RADV_", "ACO_"),
    *("AMD_", "ANV_", "INTEL_", "NVK_"),
)
"""Prefixes of the other variables that an engine inherits, by which the libraries that it loads are
configured; its settings come through the pipe."""
SPINS_AT_BARRIERS = "2000"
"""How many times an OpenMP thread spins at a barrier before it sleeps: some 20 µs, by libgomp's own
estimate.

libgomp's default lasts milliseconds. Beside a process that keeps a core busy, a token then takes up
to ten times as long. Half as many spins slow tokens of a small model by some per cent on idle cores
(loads `busy1` and `streams1` of `make bench`).
"""


def engine_environment() -> dict[str, str]:
    """The environment of an engine, and of a process that tries what it would do: what compute
    libraries and Python read, without secrets."""
    allowed = {
        name: value
        for name, value in inherited().items()
        if name in _OF_THE_SYSTEM or name.startswith(_OF_LIBRARIES)
    }
    if "OMP_WAIT_POLICY" not in allowed:
        allowed.setdefault("GOMP_SPINCOUNT", SPINS_AT_BARRIERS)
    # With PYTHONSAFEPATH, the working directory is not on Python's path.
    root = str(Path(next(iter(worker.__path__))).parent)
    paths = os.environ.get("PYTHONPATH")
    allowed["PYTHONPATH"] = os.pathsep.join([root, paths]) if paths else root
    return allowed


_CAUSES = {
    "SIGBUS": "a mapped file was truncated, or cannot be read",
    "SIGILL": "a library uses an instruction that this processor lacks",
    "SIGKILL": "from outside, most likely by the kernel for lack of memory",
}
"""The likely cause of a signal, if it is not a fault in the process's code."""


def how_it_ended(returncode: int | None, *, by_worker: bool = False) -> str:
    """How a process ended, such as `killed by SIGABRT` or `exit code 3`, with the likely cause if
    that is outside the process and not the worker itself."""
    if returncode is None:
        return "still there after SIGKILL"
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
            return f"killed by {name}" + (
                f": {_CAUSES[name]}" if name in _CAUSES and not by_worker else ""
            )
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
