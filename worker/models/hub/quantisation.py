"""Chooses a GGUF of a repository that holds one model in several quantisations.

It is the named one, or else the largest whose weights fill at most half of the memory: the rest is
for the KV cache and for other programs. A quantisation with more bits than Q8_0 is chosen only by
name; a conversion, too, has at most Q8_0 unless another type is requested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from worker.models.gguf.header import split_names
from worker.models.reference import is_projector

SHARE = 0.5
"""The share of the memory that a model's weights may fill."""
_LABEL = re.compile(
    r"(?P<model>.+?)[-._](?P<label>(?:UD-)?(?:[IT]?Q\d\w*|(?:MX|NV)FP4\w*|B?F16|FP?32|FP16))"
)
_BEYOND_Q8_0 = {"F16", "BF16", "FP16", "F32", "FP32", "UD-Q8_K_XL"}
_MATRIX = re.compile(r"(?!.*[-._][IT]?Q\d)(.*[-._])?IMATRIX")
"""Names of importance matrices, which quantisations are made with."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A model's GGUF in a repository."""

    file: str
    """The first part, if it is split."""
    model: str
    """The part of the file's name that all quantisations of one model share, in capital letters."""
    label: str
    """As in the file's name, in capital letters: `Q4_K_M`. Empty if the name has none."""
    size_bytes: int
    """Of all parts; 0 if the hub does not list the size of each."""


def models_in(files: Mapping[str, int | None]) -> list[Quantisation]:
    """The models among a repository's files, sorted by name: GGUFs, without projectors, importance
    matrices and parts after the first."""
    found = []
    for name in sorted(files):
        parts = split_names(name)
        if parts[0] != name or not name.endswith(".gguf") or is_projector(name):
            continue
        stem = _PART.sub("", name.rpartition("/")[2].removesuffix(".gguf")).upper()
        if _MATRIX.fullmatch(stem):
            continue
        match = _LABEL.fullmatch(stem)
        model, label = match.group("model", "label") if match else (stem, "")
        sizes = [files.get(part) or 0 for part in parts]
        found.append(Quantisation(name, model, label, sum(sizes) if all(sizes) else 0))
    return found


def named(found: list[Quantisation], label: str) -> list[Quantisation]:
    """Those with this label; if there are none, Unsloth's dynamic ones of it (`UD-Q4_K_XL`)."""
    own, dynamic = ([e for e in found if e.label == f"{made}{label}"] for made in ("", "UD-"))
    return own or dynamic


def of_one_model(found: list[Quantisation]) -> list[Quantisation]:
    """All of them, the smallest first; empty if they are several models, or a label or size is
    unknown."""
    is_one = len({each.model for each in found}) == 1
    is_known = all(each.label and each.size_bytes for each in found)
    return sorted(found, key=lambda e: (e.size_bytes, e.file)) if is_one and is_known else []


def fitting(found: list[Quantisation], room_bytes: int) -> Quantisation | None:
    """The largest of those up to Q8_0 that fit into `SHARE` of the memory; `found` is by size."""
    usual = [each for each in found if each.label not in _BEYOND_Q8_0]
    fits = [each for each in usual if each.size_bytes <= SHARE * room_bytes]
    return fits[-1] if fits else None
