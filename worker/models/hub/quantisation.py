"""Which GGUF of a repository that holds one model in several quantisations.

The one that is named, or else the largest whose weights fill at most half of the memory: the rest
is for the KV cache, and for what else runs there. Unquantised ones are taken by name alone, as a
conversion has Q8_0 unless another type is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from worker.models.gguf.header import split_names
from worker.models.reference import is_projector

SHARE = 0.5
_LABEL = re.compile(
    r"(?P<model>.+?)[-._](?P<label>(?:UD-)?(?:[IT]?Q\d\w*|MXFP4\w*|B?F16|FP?32|FP16))"
)
_UNQUANTISED = {"F16", "BF16", "FP16", "F32", "FP32"}
_PART = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Quantisation:
    file: str
    """The first part, if it is split."""
    model: str
    """What the names of all quantisations of one model have in common."""
    label: str
    """As the file's name has it: `Q4_K_M`."""
    size_bytes: int
    """Of all parts."""


def quantisations(files: Mapping[str, int | None]) -> list[Quantisation]:
    """Those of one model, the smallest first; none if the names or sizes tell of no such thing."""
    found = []
    for name in files:
        parts = split_names(name)
        if parts[0] != name or not name.endswith(".gguf") or is_projector(name):
            continue
        match = _labelled(name)
        sizes = [files.get(part) for part in parts]
        if match is None or None in sizes:
            return []
        total = sum(size for size in sizes if size is not None)
        found.append(Quantisation(name, match["model"], match["label"], total))
    one_model = len({each.model for each in found}) == 1
    return sorted(found, key=lambda each: (each.size_bytes, each.file)) if one_model else []


def label_of(file: str) -> str | None:
    """The quantisation that a file's name tells, in capital letters."""
    match = _labelled(file)
    return match and match["label"]


def _labelled(file: str) -> re.Match[str] | None:
    stem = _PART.sub("", file.rpartition("/")[2].removesuffix(".gguf"))
    return _LABEL.fullmatch(stem.upper())


def fitting(found: list[Quantisation], room_bytes: int) -> Quantisation | None:
    """The largest that leaves its share of the memory, or none."""
    fits = [
        each
        for each in found
        if each.label not in _UNQUANTISED and each.size_bytes <= SHARE * room_bytes
    ]
    return fits[-1] if fits else None
