"""Which GGUF of a repository that holds one model in several quantisations.

The one that is named, or else the largest whose weights fill at most half of the memory: the rest
is for the KV cache, and for what else runs there. What has more bits than Q8_0 is taken by name
alone, as a conversion has Q8_0 unless another type is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from worker.models.gguf.header import split_names
from worker.models.reference import is_projector

SHARE = 0.5
_LABEL = re.compile(
    r"(?P<model>.+?)[-._](?P<label>(?:UD-)?(?:[IT]?Q\d\w*|(?:MX|NV)FP4\w*|B?F16|FP?32|FP16))"
)
_BEYOND_Q8_0 = {"F16", "BF16", "FP16", "F32", "FP32", "UD-Q8_K_XL"}
_MATRIX = re.compile(r"(?!.*[-._][IT]?Q\d)(.*[-._])?IMATRIX")
"""An importance matrix, by which the quantisations were made."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A model's GGUF in a repository."""

    file: str
    """The first part, if it is split."""
    model: str
    """What the names of all quantisations of one model have in common."""
    label: str
    """As the file's name has it, in capital letters: `Q4_K_M`. Empty if it tells none."""
    size_bytes: int
    """Of all parts; 0 if the hub does not tell it."""


def models_in(files: Mapping[str, int | None]) -> list[Quantisation]:
    """All of a repository, by name. A projector is no model, nor is a further part, or a matrix."""
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
    """Those of this label; where there are none, Unsloth's dynamic ones of it (`UD-Q4_K_XL`)."""
    own, dynamic = ([e for e in found if e.label == f"{made}{label}"] for made in ("", "UD-"))
    return own or dynamic


def of_one_model(found: list[Quantisation]) -> list[Quantisation]:
    """All of them, the smallest first; none if the names or sizes tell of no such thing."""
    is_one = len({each.model for each in found}) == 1
    is_told = all(each.label and each.size_bytes for each in found)
    return sorted(found, key=lambda e: (e.size_bytes, e.file)) if is_one and is_told else []


def fitting(found: list[Quantisation], room_bytes: int) -> Quantisation | None:
    """The largest whose weights fill at most their share of the memory, or none."""
    fits = [
        each
        for each in found
        if each.label not in _BEYOND_Q8_0 and each.size_bytes <= SHARE * room_bytes
    ]
    return fits[-1] if fits else None
