"""Published repositories as `prepare` sees them: their `config.json` and tokenizer definition, and
weights with names, types and shapes in a sparse file without data.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from tests.unit.convert.files import write_hollow

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
DATA = Path(__file__).parents[2] / "data/definitions"
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "published.json").read_text())
TENSORS: dict[str, dict[str, list[Any]]] = json.loads((DATA / "tensors.json").read_text())
"""The tensors that transformers saves for a configuration."""


def write(folder: Path, config: dict[str, Any], weights: Iterable[tuple[str, Shape]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_hollow(folder / "model.safetensors", weights)


def write_shards(
    folder: Path, index: bytes, shapes: Mapping[str, Shape], others: Mapping[str, str] = {}
) -> None:
    """Write the files that a published index lists, each with its tensors."""
    (folder / "model.safetensors.index.json").write_bytes(index)
    shards: dict[str, list[tuple[str, Shape]]] = defaultdict(list)
    for name, shard in json.loads(index)["weight_map"].items():
        shards[shard].append((name, shapes[name]))
    for shard, weights in shards.items():
        write_hollow(folder / shard, weights, others=others)


def numbers(text: str) -> Iterator[int]:
    for run in text.split(","):
        first, _, last = run.partition("-")
        yield from range(int(first), int(last or first) + 1)


def tensors(model: str) -> Shapes:
    return {
        pattern.format(*at): tuple(shape)
        for pattern, groups in TENSORS[model].items()
        for shape, axes in groups
        for at in product(*map(numbers, axes))
    }
