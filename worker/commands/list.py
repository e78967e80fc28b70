"""`llorch-convert list`: the aliases of models.toml, or the families that can be converted."""

from __future__ import annotations

import argparse

from worker.commands import source
from worker.convert.progress import Reporter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source.add_models_file(parser)
    parser.add_argument(
        "--families", action="store_true", help="the architectures that can be converted instead"
    )


def run(options: argparse.Namespace, _report: Reporter) -> None:
    if options.families:
        from worker.convert.architectures import FAMILIES

        for family in sorted(FAMILIES, key=lambda family: (family.architecture, family.names)):
            print(f"{family.architecture:<12} {', '.join(family.names)}")
        return
    from worker.models import listing, registry

    print(listing.registry_text(registry.load(source.models_file(options))))
