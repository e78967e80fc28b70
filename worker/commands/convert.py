"""`llorch-convert`: SafeTensors in, a verified GGUF out; the first word may name another command.

Runs in a process of its own, also when the worker needs a conversion at its start. Ends with the
exit code of the error it met; whoever reads its JSON lines gets the same error as an object.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import get_args

from worker.commands import adapter, cache, inspect, list, source, verify
from worker.convert.output_types import FORMATS
from worker.convert.progress import Reporter, Style, reporter
from worker.errors import ModelError, WorkerError

_MOST_THREADS = 1024


def main(arguments: Sequence[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code. The fault is on stderr, or in the last JSON line."""
    if not arguments or arguments[0] not in ("convert", *_OTHERS, "-h", "--help"):
        arguments = ["convert", *arguments]
    options = _parser().parse_args(arguments)
    report = reporter(options.progress)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        options.run(options, report)
    except WorkerError as error:
        report.failed(error)
        return error.exit_code
    except OSError as error:
        name = f" {error.filename}" if error.filename else ""
        report.failed(ModelError(f"conversion failed:{name} {error.strerror or error}"))
        return ModelError.exit_code
    except KeyboardInterrupt:
        report.failed(ModelError("conversion interrupted; nothing was written"))
        return 130
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _convert(options: argparse.Namespace, report: Reporter) -> None:
    from worker.convert.convert import convert
    from worker.convert.prepare import Options

    result = convert(
        source.folder(options, report),
        options.destination,
        Options(
            outtype=options.outtype,
            pre_tokenizer=options.pre_tokenizer,
            name=options.name,
            imatrix=options.imatrix,
            n_threads=options.threads,
        ),
        report,
    )
    report.finished(result)


_OTHERS: Mapping[str, tuple[ModuleType, str]] = {
    "verify": (verify, "compare a GGUF with the SafeTensors it came of"),
    "inspect": (inspect, "print a GGUF's metadata and tensors"),
    "list": (list, "show the aliases, or the families"),
    "cache": (cache, "list downloads and conversions, or remove some"),
    "adapter": (adapter, "write a GGUF adapter from a PEFT LoRA adapter"),
}


def _n_threads(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST_THREADS}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llorch-convert", description="SafeTensors in, a verified GGUF out."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="write a GGUF from SafeTensors")
    source.add_arguments(convert)
    convert.add_argument("destination", type=Path, help="the GGUF file to write")
    convert.add_argument("--outtype", choices=[*FORMATS], default="q8_0")
    convert.add_argument("--imatrix", type=Path, help="importance matrix, for K-quants")
    convert.add_argument("--name", help="the model's name in the file (default: its folder's)")
    convert.add_argument("--pre-tokenizer", metavar="NAME", help=source.PRE_TOKENIZER_HELP)
    convert.add_argument(
        "--threads", type=_n_threads, metavar="N", help="default: one more than processors"
    )
    convert.set_defaults(run=_convert)
    for name, (module, text) in _OTHERS.items():
        other = commands.add_parser(name, help=text)
        module.add_arguments(other)
        other.set_defaults(run=module.run)
    for command in commands.choices.values():
        command.add_argument("--progress", choices=get_args(Style), default="bar")
    return parser


if __name__ == "__main__":
    main()
