"""`llorch-convert cache`: lists what the cache holds, and evicts models from it."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker.commands import source
from worker.convert.progress import Reporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache-dir", type=Path, help="default: the worker's cache")
    parser.add_argument(
        "--remove", nargs="+", default=[], metavar="KEY", help="the beginning of one or more keys"
    )
    parser.add_argument(
        "--older-than", type=float, metavar="DAYS", help="remove what was not used for so long"
    )


def run(options: argparse.Namespace, _report: Reporter) -> None:
    from worker.installation import default_cache_dir
    from worker.models import listing
    from worker.models.stored import select, stored_models

    folder = source.cache_dir(options) or default_cache_dir()
    stored = stored_models(folder)
    chosen = select(stored, options.remove, options.older_than)
    for each in chosen:
        each.remove()
        print(f"removed {each.name}: {listing.size_text(each.size_bytes)}")
    if not options.remove and options.older_than is None:
        print(listing.stored_text(stored, folder))
