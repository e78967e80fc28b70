"""The families that can be converted: each module here describes one, or several related ones.

Every `Family` in a module of this folder is registered. `architectures` in a checkpoint's
`config.json` selects its family.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Iterator
from importlib import import_module

from worker.convert.config import Config
from worker.convert.family.defaults import completed
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

_SAME_LAYERS = {"Model": "ForCausalLM", "ForMaskedLM": "Model"}
"""Suffixes of class names, each with that of a class that has the same layers. An embedding decoder
has no head; an encoder's head that predicts masked tokens is left out."""


def family_of(config: Config) -> Family | None:
    """The family of the checkpoint's class, or else of a class with the same layers."""
    names = set(map(str, config.items("architectures")))
    if not names:
        raise ModelError(f"{config.name}: architectures names no class, such as LlamaForCausalLM")
    others = {
        name.removesuffix(end) + other
        for name in names
        for end, other in _SAME_LAYERS.items()
        if name.endswith(end)
    }
    whole = completed(config)
    for each in (names, others):
        for family in FAMILIES:
            if each.intersection(family.names) and family.applies(whole):
                return family
    return None


def unknown(config: Config, others: Iterable[str]) -> ModelError:
    """The error for an architecture that is not known here and not among `others`, those of
    llama.cpp's own converter."""
    name = str(config.items("architectures")[0])
    known = {name for family in FAMILIES for name in family.names}.union(others)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return ModelError(
        f"architecture {name} cannot be converted; the nearest known one is {near[0]}, "
        "llorch-convert list --families prints all",
        architecture=name,
    )
