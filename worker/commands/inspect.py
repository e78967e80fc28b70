"""`llorch-convert inspect`: a GGUF's metadata and tensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker.convert.progress import Reporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)


def run(options: argparse.Namespace, _report: Reporter) -> None:
    from worker.models import listing
    from worker.models.gguf.header import read_header

    print(listing.header_text(read_header(options.file)))
