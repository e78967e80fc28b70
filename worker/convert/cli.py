"""`llorch-convert`: the converter's command line.

Runs in a process of its own, also when the worker needs a conversion at its start. Ends with the
exit code of the error it met; whoever reads its JSON lines gets the same error as an object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import get_args

from worker.convert.progress import Reporter, Style, reporter
from worker.errors import ModelError, WorkerError

_COMMANDS = ("convert", "list", "inspect", "verify")
OUTTYPES = (
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q6_k",
    "q5_k_m",
    "q4_k_m",
    "q4_k_s",
    "q4_0",
    "q3_k_m",
    "q2_k",
)

_SOURCE = "a folder of SafeTensors, hf:owner/repo@revision, or an alias of models.toml"


def main(arguments: Sequence[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    if not arguments or arguments[0] not in (*_COMMANDS, "-h", "--help"):
        arguments.insert(0, "convert")
    options = _parser().parse_args(arguments)
    report = reporter(options.progress)
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        _ACTIONS[options.command](options, report)
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


def _interrupted(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _convert(options: argparse.Namespace, report: Reporter) -> None:
    from worker.convert.convert import Options, convert

    result = convert(
        _checkpoint(options, report),
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


def _list(options: argparse.Namespace, _report: Reporter) -> None:
    from worker.models import describe, registry

    print(describe.registry_text(registry.load(_models_file(options))))


def _inspect(options: argparse.Namespace, _report: Reporter) -> None:
    from worker.models import describe
    from worker.models.gguf import read_header

    print(describe.header_text(read_header(options.file)))


def _verify(options: argparse.Namespace, report: Reporter) -> None:
    from worker.convert.convert import verify_existing

    n_tensors = verify_existing(_checkpoint(options, report), options.file, report)
    print(f"{options.file} is what its source gives: {n_tensors} tensors and all test texts agree")


def _checkpoint(options: argparse.Namespace, report: Reporter) -> Path:
    """The folder of SafeTensors that SOURCE names, downloaded first where it is on the hub."""
    from worker.models.reference import PathReference, parse
    from worker.models.resolve import resolve_checkpoint

    if not isinstance(parse(options.source), PathReference):
        if options.progress != "bar":
            # The hub's client draws a bar of its own on a terminal.
            from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

            disable_progress_bars()
        # The download warns in the log.
        from worker.observability import logs

        logs.configure("warning")
    cache_dir = options.cache_dir or _path_from("LLORCH_CACHE_DIR")
    return asyncio.run(
        resolve_checkpoint(
            options.source,
            models_file=_models_file(options),
            cache_dir=cache_dir.expanduser() if cache_dir else None,
            on_progress=report.fetch,
        )
    )


def _models_file(options: argparse.Namespace) -> Path | None:
    found: Path | None = options.models_file or _path_from("LLORCH_MODELS_FILE")
    return found


def _path_from(variable: str) -> Path | None:
    """The worker's own settings, for those who set them as variables."""
    value = os.environ.get(variable)
    return Path(value) if value else None


_ACTIONS = {"convert": _convert, "list": _list, "inspect": _inspect, "verify": _verify}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llorch-convert", description="SafeTensors in, a verified GGUF out."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="write a GGUF from SafeTensors")
    convert.add_argument("source", help=_SOURCE)
    convert.add_argument("destination", type=Path, help="the GGUF file to write")
    convert.add_argument("--outtype", choices=OUTTYPES, default="q8_0")
    convert.add_argument("--imatrix", type=Path, help="importance matrix, for K-quants")
    convert.add_argument("--name", help="the model's name in the file (default: its folder's)")
    convert.add_argument(
        "--pre-tokenizer", metavar="NAME", help="llama.cpp's pre-tokenizer, against the definition"
    )
    convert.add_argument("--threads", type=int, help="default: one more than processors")
    listing = commands.add_parser("list", help="show the models that have an alias")
    inspect = commands.add_parser("inspect", help="print a GGUF's metadata and tensors")
    inspect.add_argument("file", type=Path)
    verify = commands.add_parser("verify", help="hold a GGUF against the SafeTensors it is made of")
    verify.add_argument("source", help=_SOURCE)
    verify.add_argument("file", type=Path)
    for command in (convert, verify):
        command.add_argument(
            "--cache-dir", type=Path, help="where downloads go (default: the worker's cache)"
        )
    for command in (convert, verify, listing):
        command.add_argument("--models-file", type=Path, help="a registry of your own")
    for command in (convert, listing, inspect, verify):
        command.add_argument("--progress", choices=get_args(Style), default="bar")
    return parser
