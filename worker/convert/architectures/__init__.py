"""The families that can be converted: a module of this folder describes one, or a few of a kind.

A description is found by being here. The family of a checkpoint is told by `architectures` in its
`config.json`.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterator
from importlib import import_module

from worker.convert.config import Config
from worker.convert.family.rules import Family
from worker.errors import ModelError


def _described() -> Iterator[Family]:
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for value in vars(import_module(f"{__name__}.{module}")).values():
            if isinstance(value, Family):
                yield value
                if value.multimodal:
                    yield value.text_part()


FAMILIES: tuple[Family, ...] = tuple(_described())


def family_of(config: Config) -> Family:
    names = config.items("architectures")
    known = {name for family in FAMILIES for name in family.names}
    for name in known.intersection(map(str, names)):
        for family in FAMILIES:
            if name in family.names and family.applies(config):
                return family
    name = str(names[0]) if names else "none"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ModelError(
        f"architecture {name} cannot be converted; the nearest known one is {near[0]}, "
        f"all are: {', '.join(sorted(known))}",
        architecture=name,
    )
