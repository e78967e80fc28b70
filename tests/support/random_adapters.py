"""Random LoRA adapters and control vectors, as GGUF files, that change a model's answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFType, GGUFWriter
from gguf.constants import Keys
from gguf.quants import dequantize

from tests.support.gguf_file import finish
from tests.support.made import made_once

MOST_ROWS = 512
"""At most this many rows of a matrix are used to estimate the size of its weights."""


def random_adapters(base: Path, rank: int = 4) -> tuple[Path, ...]:
    """Write two adapters for `base`."""
    return tuple(_adapter(base, seed, rank) for seed in range(2))


@made_once("{base.stem}.lora{seed}.gguf")
def _adapter(target: Path, base: Path, seed: int, rank: int) -> None:
    random_adapter(base, target, seed, rank=rank)


def random_adapter(base: Path, target: Path, seed: int, *, rank: int = 4) -> Path:
    """Write an adapter for all matrices in the layers of `base`, whose changes are about twice as
    large as the weights themselves."""
    model = GGUFReader(str(base))
    architecture = model.fields["general.architecture"].contents()
    writer = GGUFWriter(str(target), architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, float(rank))
    dice = np.random.default_rng(seed)
    for tensor in model.tensors:
        *experts, height, width = (1, *(int(n) for n in reversed(tensor.shape)))
        if not tensor.name.startswith("blk.") or min(width, height) < 16:
            continue
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])[:MOST_ROWS]
        size = float(dequantize(rows, tensor.tensor_type).std())
        each = (size * 2 / rank**0.5) ** 0.5
        a = dice.standard_normal((*experts[1:], rank, width), np.float32) * each
        b = dice.standard_normal((*experts[1:], height, rank), np.float32) * each
        writer.add_tensor(f"{tensor.name}.lora_a", a)
        writer.add_tensor(f"{tensor.name}.lora_b", b)
    finish(writer)
    return target


def random_control_vector(base: Path, target: Path, seed: int, *, width: int | None = None) -> Path:
    """Write a direction for each layer of `base` that may have one; a different `width` is
    invalid."""
    fields = GGUFReader(str(base)).fields
    architecture = fields["general.architecture"].contents()
    n_layers = fields[f"{architecture}.block_count"].contents()
    width = width or fields[f"{architecture}.embedding_length"].contents()
    writer = GGUFWriter(str(target), "controlvector")
    dice = np.random.default_rng(seed)
    for layer in range(1, n_layers):
        direction = dice.standard_normal(width, np.float32) * 0.5
        writer.add_tensor(f"direction.{layer}", direction)
    finish(writer)
    return target
