"""`python -m tools.differential`: sends the same requests to llama-server and to the worker."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.differential.compare import Report
from tools.differential.servers import pairs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.differential")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="paths that contain this")
    parser.add_argument("--show", type=int, default=2, help="examples of each fault")
    given = parser.parse_args()
    began = time.monotonic()
    report = Report()
    with TemporaryDirectory() as folder:
        for pair in pairs(Path(folder)):
            with pair:
                report.add(pair, given.requests, given.seed, given.only)
    print(report.text(given.show))
    print(f"{report.n_asked} requests in {time.monotonic() - began:.0f} s")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
