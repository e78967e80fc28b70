"""Weights that are drawn anew where a checkpoint is too large to be committed: by tensor name, from
the one random stream that NumPy keeps as it is.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

SHAPES = "shapes.json"
"""Of the checkpoint's tensors, by name."""


def write(folder: Path) -> None:
    """`model.safetensors` in BF16, by the folder's `shapes.json`."""
    shapes: dict[str, list[int]] = json.loads((folder / SHAPES).read_text())
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            file.write(values(name, shape).tobytes())


def values(name: str, shape: list[int]) -> npt.NDArray[np.uint16]:
    """BF16 bits, wide enough for every tensor to show in the logits."""
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:  # Behind a block: small, so that what a block rounds stays small.
        drawn = (0.2 if "post_" in name else 1.0) * (1 + 0.2 * drawn)
    elif len(shape) == 1:
        drawn = 0.2 * drawn
    else:
        drawn = drawn * 0.9 / (4 if "embed" in name else shape[-1]) ** 0.5
    return (drawn.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
