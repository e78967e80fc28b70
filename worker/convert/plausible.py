"""Compares the sizes in a configuration with what the checkpoint's files hold.

A number in `config.json` costs nothing to write, but layers, experts and tokens cost memory. So
such numbers are compared with the tensors before anything is computed from them.
"""

from __future__ import annotations

from dataclasses import asdict

from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.errors import ModelError

_SLACK = 4
"""Some sizes are a small multiple of what a tensor has, such as an optional module's."""


def check_config(config: Config, checkpoint: Checkpoint) -> None:
    n, key = len(checkpoint.tensors), "num_hidden_layers"
    if type(value := config.values.get(key)) is int and value > n:
        what = f"{config.spelling(key)} is {value}, but the checkpoint has {n} tensors"
        raise ModelError(f"{config.name}: {what}")


def check_dims(config: Config, d: Dims, checkpoint: Checkpoint) -> None:
    shapes = (info.shape for info in checkpoint.tensors.values() if info.size_bytes)
    most = _SLACK * max((*(n for shape in shapes for n in shape), len(checkpoint.tensors)))
    for name, size in {**asdict(d), **d.extra}.items():
        if isinstance(size, int) and size > most:
            keys = [config.spelling(key) for key, value in config.values.items() if value == size]
            what = keys[0] if keys else f"a size that is computed from it ({name})"
            why = f"{what} is {size}, more than the checkpoint's tensors can have"
            raise ModelError(f"{config.name}: {why}")
