"""`llorch-convert verify`: checks that a GGUF is what its source gives."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker.commands import source
from worker.convert.progress import Reporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source.add_arguments(parser)
    parser.add_argument("file", type=Path)
    parser.add_argument("--name", help="as it was given to the conversion")
    parser.add_argument("--imatrix", type=Path, help="as it was given to the conversion")
    parser.add_argument("--pre-tokenizer", metavar="NAME", help=source.PRE_TOKENIZER_HELP)


def run(options: argparse.Namespace, report: Reporter) -> None:
    from worker.convert.prepare import Options
    from worker.convert.verify import check_file

    given = Options(name=options.name, pre_tokenizer=options.pre_tokenizer, imatrix=options.imatrix)
    n_tensors = check_file(source.folder(options, report), options.file, given, report)
    print(f"{options.file} is what its source gives: {n_tensors} tensors and all test texts agree")
