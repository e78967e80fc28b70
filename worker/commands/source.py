"""The argument SOURCE of `llorch-convert` and `verify`: a local checkpoint or one on the hub."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from worker.convert.progress import Reporter

PRE_TOKENIZER_HELP = "llama.cpp's pre-tokenizer, instead of the one that tokenizer.json defines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="a folder of SafeTensors, hf:owner/repo@revision, or an alias of models.toml"
    )
    parser.add_argument(
        "--cache-dir", type=Path, help="where downloads go (default: the worker's cache)"
    )
    add_models_file(parser)


def add_models_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models-file", type=Path, help="a registry of your own")


def folder(options: argparse.Namespace, report: Reporter) -> Path:
    """The folder of SafeTensors that SOURCE names; downloaded first if it is on the hub."""
    from worker.models.reference import PathReference, parse
    from worker.models.resolve import resolve_checkpoint

    if not isinstance(parse(options.source), PathReference):
        if options.progress != "bar":
            # The hub's client draws its own progress bar on a terminal.
            from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

            disable_progress_bars()
        # The download's warnings go to the log.
        from worker.observability import logs

        logs.configure("warning")
    return asyncio.run(
        resolve_checkpoint(
            options.source,
            models_file=models_file(options),
            cache_dir=cache_dir(options),
            on_progress=report.fetch,
        )
    )


def cache_dir(options: argparse.Namespace) -> Path | None:
    given: Path | None = options.cache_dir or _path_from("LLORCH_CACHE_DIR")
    return given.expanduser() if given else None


def models_file(options: argparse.Namespace) -> Path | None:
    given: Path | None = options.models_file
    return given or _path_from("LLORCH_MODELS_FILE")


def _path_from(variable: str) -> Path | None:
    """A path from the worker's own variables, for users who set them."""
    value = os.environ.get(variable)
    return Path(value) if value else None
