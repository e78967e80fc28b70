"""The engine's suites on llama.cpp under the address and undefined-behaviour sanitizers.

`python -m tools.sanitized` (`make asan`, which makes the venv that it needs) runs each suite in a
process of its own, counts its tests and the sanitizers' reports, and fails if there is a report
that is not in `SUPPRESSED`. Arguments are those of pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SUITES = (
    "tests/unit/engine/test_memory_kinds.py",
    "tests/unit/engine/test_random_walk.py",
    "tests/unit/engine/test_real_engine.py",
    "tests/unit/engine/test_constraints.py",
    "tests/unit/engine/test_samplers.py",
    "tests/unit/engine/test_speculation.py",
    "tests/unit/llama",
    "tests/unit/models/test_gguf_native.py",
)
"""Hybrids and windows, cancels, both models' real engines, grammars, samplers, hostile GGUFs."""
SUPPRESSED: dict[str, str] = {}
"""UBSan's check and function or file, for undefined behaviour in llama.cpp that is harmless on all
processors → the reason."""
SAID = re.compile(r"^(.*: runtime error: .*|.*ERROR: AddressSanitizer.*)$", re.MULTILINE)
ADDRESSES = re.compile(r"0x[0-9a-f]+|==\d+==")


def environment(folder: Path) -> dict[str, str]:
    """Preload the sanitizers' libraries, because Python itself is not built with them."""
    (suppressions := folder / "suppressions").write_text("\n".join(SUPPRESSED) + "\n")
    log = f"log_path={folder}/said"
    # Damaged files request any amount of memory; that the allocator refuses is not a fault.
    address = f"detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=8192:{log}"
    undefined = f"print_stacktrace=1:suppressions={suppressions}:{log}"
    libraries = ":".join(map(library, ("libasan.so", "libubsan.so", "libstdc++.so.6")))
    sanitizers = {"ASAN_OPTIONS": address, "UBSAN_OPTIONS": undefined, "LD_PRELOAD": libraries}
    return os.environ | sanitizers


def library(name: str) -> str:
    """Return the path of a library, according to the compiler."""
    command = [*os.environ.get("CXX", "c++").split(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    said: Counter[str] = Counter()
    codes = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sanitized = environment(folder)
        for suite in SUITES:
            print(suite, flush=True)
            command = [sys.executable, "-m", "pytest", "-q", suite, *sys.argv[1:]]
            codes[suite] = subprocess.run(command, env=sanitized).returncode
        for report in folder.glob("said.*"):
            said.update(ADDRESSES.sub("", each) for each in SAID.findall(report.read_text()))
    for what, n in said.most_common():
        print(f"{n} x {what}")
    failed = [suite for suite, code in codes.items() if code != 0]
    print(f"{len(SUITES)} suites, {sum(said.values())} faults; failed: {failed or 'none'}")
    return 1 if said or failed else 0


if __name__ == "__main__":
    sys.exit(main())
