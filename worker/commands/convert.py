"""`llorch-convert`: SafeTensors in, a verified GGUF out, and other commands for model files.

Runs in its own process, even if the worker needs a conversion at its start. Exits with the exit
code of the error that it met, which is also an object in its JSON lines. Each command imports what
it needs when it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from worker.arguments import Parser, add_command, whole_number
from worker.commands.progress import Reporter, Style
from worker.convert.output_types import FORMATS
from worker.errors import ConfigError, ModelError, WorkerError, not_utf8, system_failure
from worker.installation import default_cache_dir, own_version

_MOST_THREADS = 1024
_COMMANDS = ("convert", "verify", "inspect", "list", "cache", "adapter")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code. An error is on stderr, or in the last JSON line."""
    if arguments and arguments[0] not in (*_COMMANDS, "-h", "--help", "--version"):
        arguments = ["convert", *arguments]
    options = _parser().parse_args(arguments)
    report = Reporter(options.progress)
    try:
        options.run(options, report)
    except BrokenPipeError:  # handled by `cli`
        raise
    except WorkerError as error:
        report.failed(error)
        return error.exit_code
    except UnicodeEncodeError as error:
        report.failed(not_utf8(error))
        return ConfigError.exit_code
    except Exception as error:
        if (failure := system_failure(error)) is None:
            raise
        if isinstance(error, OSError):
            failure = ModelError(f"{options.command} failed: {failure.message}")
        report.failed(failure)
        return failure.exit_code
    except KeyboardInterrupt:
        report.failed(ModelError(f"{options.command} interrupted; no file was written"))
        return 130
    return 0


# --- the commands ------------------------------------------------------------------------


def _convert(options: argparse.Namespace, report: Reporter) -> None:
    from worker.convert.convert import convert
    from worker.convert.prepare import Options
    from worker.models.checkpoint_files import checkpoint_files

    given = Options(
        outtype=options.outtype,
        pre_tokenizer=options.pre_tokenizer,
        name=options.name,
        imatrix=options.imatrix,
        n_threads=options.threads,
        projector=options.mmproj,
    )
    destination, source = _destination(options), _source(options, report)
    matrix = [] if given.imatrix is None else [given.imatrix]
    _refuse_to_overwrite([*checkpoint_files(source), *matrix], destination)
    made = convert(source, destination, given, report, overwrite=options.overwrite)
    report.finished(
        made,
        f"wrote {made['path']}: {made['outtype']}, {made['n_tensors']} tensors, "
        f"{made['size_bytes']:,} bytes, {made['seconds']:.1f} s, verified",
    )


def _verify(options: argparse.Namespace, report: Reporter) -> None:
    from worker.convert import manifest
    from worker.convert.prepare import Options
    from worker.convert.verify import check_file
    from worker.models.gguf.header import read_header

    given = Options(name=options.name, pre_tokenizer=options.pre_tokenizer, imatrix=options.imatrix)
    n_tensors = check_file(_source(options, report), options.file, given, report)
    differs = read_header(options.file).metadata.get(manifest.DIFFERENCE)
    texts = f"as noted at its conversion, {differs}" if differs else "all test texts agree"
    report.finished(
        {"path": str(options.file), "n_tensors": n_tensors, "difference": differs},
        f"{options.file} matches its source: {n_tensors} tensors agree; {texts}",
    )


def _inspect(options: argparse.Namespace, _report: Reporter) -> None:
    from worker.commands import listing
    from worker.models.gguf.header import read_header

    print("\n".join(listing.header_lines(read_header(options.file))))


def _list(options: argparse.Namespace, _report: Reporter) -> None:
    if options.families:
        from worker.convert import upstream
        from worker.convert.architectures import FAMILIES

        ours = {name for family in FAMILIES for name in family.names}
        by_architecture: dict[str, set[str]] = {}
        for family in FAMILIES:
            by_architecture.setdefault(family.architecture, set()).update(family.names)
        width = max(map(len, by_architecture))
        for architecture, names in sorted(by_architecture.items()):
            print(f"{architecture:<{width}}  {', '.join(sorted(names))}")
        print(f"\nwith llama.cpp's own converter, which needs PyTorch ({upstream.NEEDS}):")
        print(textwrap.fill(" ".join(sorted(upstream.classes() - ours)), 100))
        return
    from worker.commands import listing
    from worker.models import registry

    print(listing.registry_text(registry.load(options.models_file)))


def _cache(options: argparse.Namespace, _report: Reporter) -> None:
    from worker.commands import listing
    from worker.models.stored import select, stored_models

    folder = options.cache_dir
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"the cache {str(folder)!r} is not a folder; set --cache-dir")
    stored = stored_models(folder)
    for each in select(stored, options.remove, options.older_than):
        each.remove()
        print(f"removed {each.name}: {listing.size_text(each.size_bytes)}")
    if not options.remove and options.older_than is None:
        print(listing.stored_text(stored, folder))


def _adapter(options: argparse.Namespace, report: Reporter) -> None:
    from worker.convert.adapter import convert_adapter
    from worker.models.gguf.header import read_header

    destination = _destination(options)
    _refuse_to_overwrite([options.base, *options.adapter.glob("*")], destination)
    base = read_header(options.base)
    count = convert_adapter(options.adapter, base, destination, overwrite=options.overwrite)
    report.finished(
        {"path": str(destination), "n_weights": count},
        f"{destination} adapts {count} weights of {options.base}",
    )


def _destination(options: argparse.Namespace) -> Path:
    path: Path = options.destination
    if path.suffix == ".safetensors":
        raise ConfigError(f"{path} would be a GGUF; name a file that ends in .gguf")
    if os.path.lexists(path) and not path.is_file():
        raise ConfigError(f"{path} exists and is not a file; choose another name")
    if path.is_file() and not options.overwrite:
        raise ConfigError(f"{path} already exists; --overwrite replaces it")
    return path


def _refuse_to_overwrite(files: Iterable[Path], destination: Path) -> None:
    """Refuse to overwrite one of the input files."""
    if any(each.exists() and destination.samefile(each) for each in files if destination.exists()):
        raise ConfigError(f"{destination} is read for this conversion; choose another name")


# --- their arguments ---------------------------------------------------------------------


class _Parser(Parser):
    other_names = {
        "DESTINATION, the word after SOURCE": ("-o", "--outfile", "--output", "--out"),
        "SOURCE, the first word": ("-m", "--model", "--model-dir", "--hf-repo", "--repo"),
        "SOURCE, as hf:owner/repo@revision": ("--remote", "--revision"),
        "BASE, the word after ADAPTER": ("--base", "--base-model-id"),
        "--name": ("--model-name",),
        "--outtype": ("-q", "--quantize", "--quant", "--quantization", "--dtype"),
        "--cache-dir": ("--local-dir",),
        "--threads": ("-t", "--nthreads"),
        "--overwrite": ("-f", "--force"),
        "--progress": ("-v", "--verbose", "--quiet"),
        "--version": ("-V",),
        "list --families": ("--print-supported-models",),
        "the variable HF_TOKEN": ("--token", "-hft", "--hf-token"),
    }
    """Flags of other converters and of the hub's client."""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="llorch-convert",
        description="Convert SafeTensors to a verified GGUF. `llorch-convert SOURCE DESTINATION` "
        "is short for `llorch-convert convert SOURCE DESTINATION`.",
        epilog="exit codes: 0 done, 1 a fault of the converter, 2 usage, 3 the source, another "
        "file or the result, 4 no intact llama.cpp wheel, 6 download, 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    convert = add_command(commands, "convert", "write a GGUF from SafeTensors")
    _add_source(convert)
    _add_destination(convert)
    text = "type of the weights (default: q8_0)"
    convert.add_argument("--outtype", type=str.lower, choices=[*FORMATS], default="q8_0", help=text)
    convert.add_argument(
        "--imatrix", type=_path, help="importance matrix, for types of fewer than 8 bits"
    )
    convert.add_argument(
        "--name", type=_text, help="the model's name in the file (default: its folder's)"
    )
    convert.add_argument(
        "--mmproj", action="store_true", help="write the projector for pictures and sounds"
    )
    _add_pre_tokenizer(convert)
    text = "number of threads; default: number of processors + 1"
    convert.add_argument("--threads", type=whole_number(_MOST_THREADS), metavar="N", help=text)
    convert.set_defaults(run=_convert)

    verify = add_command(commands, "verify", "compare a GGUF with its source SafeTensors")
    _add_source(verify)
    verify.add_argument("file", type=_path, help="the GGUF file that llorch-convert wrote")
    verify.add_argument("--name", type=_text, help="the --name of the conversion, if it had one")
    text = "the --imatrix of the conversion, if it had one"
    verify.add_argument("--imatrix", type=_path, help=text)
    _add_pre_tokenizer(verify)
    verify.set_defaults(run=_verify)

    inspect = add_command(commands, "inspect", "print a GGUF's metadata and tensors")
    inspect.add_argument("file", type=_path, help="a GGUF file")
    inspect.set_defaults(run=_inspect)

    aliases = add_command(commands, "list", "list the aliases, or the convertible architectures")
    _add_models_file(aliases)
    aliases.add_argument(
        "--families", action="store_true", help="list the architectures instead of the aliases"
    )
    aliases.set_defaults(run=_list)

    cache = add_command(commands, "cache", "list downloads and conversions, or remove some")
    _add_cache_dir(cache, "the cache folder (default: the worker's)")
    text = "remove models whose keys begin with KEY"
    cache.add_argument("--remove", nargs="+", default=[], metavar="KEY", help=text)
    cache.add_argument(
        "--older-than",
        type=_days,
        metavar="DAYS",
        help="remove models that were not used for this many days",
    )
    cache.set_defaults(run=_cache)

    adapter = add_command(commands, "adapter", "write a GGUF adapter from a PEFT LoRA adapter")
    adapter.add_argument("adapter", type=_path, help="a folder with adapter_config.json")
    adapter.add_argument("base", type=_path, help="the GGUF of the model that it was trained on")
    _add_destination(adapter)
    adapter.set_defaults(run=_adapter)
    parser.set_defaults(progress="none")
    for command in (convert, verify, adapter):
        text = "how progress is shown: as JSON lines, as a bar (default) or not at all"
        command.add_argument("--progress", choices=get_args(Style), default="bar", help=text)
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="a folder of SafeTensors, hf:owner/repo@revision, or an alias of models.toml"
    )
    _add_cache_dir(parser, "folder for downloads (default: the worker's cache)")
    _add_models_file(parser)


def _add_cache_dir(parser: argparse.ArgumentParser, text: str) -> None:
    default = os.environ.get("LLORCH_CACHE_DIR") or default_cache_dir()
    parser.add_argument("--cache-dir", type=_path, default=default, help=text)


def _path(text: str) -> Path:
    if _text(text) == "-":
        why = "a stream cannot replace a file here; give a file's name"
        raise argparse.ArgumentTypeError(f"{why}, or ./- for a file named -")
    return Path(os.path.expanduser(text))


def _text(text: str) -> str:
    if not text:  # `Path` would read it as the working folder
        raise argparse.ArgumentTypeError("an empty text is not a name")
    return text


def _add_models_file(parser: argparse.ArgumentParser) -> None:
    given = os.environ.get("LLORCH_MODELS_FILE") or None
    text = "a models.toml; default: the one in the working folder, else the worker's own"
    parser.add_argument("--models-file", type=_path, default=given, help=text)


def _add_destination(command: argparse.ArgumentParser) -> None:
    command.add_argument("destination", type=_path, help="the GGUF file to write")
    command.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _add_pre_tokenizer(parser: argparse.ArgumentParser) -> None:
    text = "llama.cpp's pre-tokenizer, instead of the one that tokenizer.json defines"
    parser.add_argument("--pre-tokenizer", type=_text, metavar="NAME", help=text)


def _days(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (days := float(text)) >= 0:
            return days
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")


def _source(options: argparse.Namespace, report: Reporter) -> Path:
    """The folder of SafeTensors that SOURCE names; downloaded first if it is on the hub."""
    from worker.models.reference import CHECKPOINTS, parse
    from worker.models.resolve import resolve_checkpoint

    if not isinstance(parse(options.source, CHECKPOINTS), Path):
        # For warnings of the download.
        from worker.observability import logs

        logs.configure("warning")
    places = options.models_file, options.cache_dir
    return asyncio.run(resolve_checkpoint(options.source, *places, report.show))


if __name__ == "__main__":
    from worker.cli import convert

    convert()
