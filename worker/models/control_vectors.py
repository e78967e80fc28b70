"""Reads control vectors, which are GGUFs with a direction for each layer, and adds them up.

Runs in the engine process before the load, and in the preflight's child process.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.errors import ConfigError, ModelError, of_flag
from worker.models.gguf.header import GgufHeader
from worker.models.gguf.layout import GgufLayout, read_layout
from worker.wire.engine_settings import EngineSettings

Directions = npt.NDArray[np.float32]
_NAME = re.compile(r"direction\.([1-9]\d{0,3})")


def layers_of(settings: EngineSettings, model: GgufHeader) -> tuple[int, int]:
    """The first and the last layer that control vectors change. Layer 0 is never changed.

    Raises `ConfigError` if the model has no such layers.
    """
    last = (model.block_count or 1) - 1
    first, wanted = settings.control_vector_layer_range or (1, last)
    # As an end, one too many is accepted: it is llama-server's default.
    if wanted > last + 1 or (settings.control_vector_layer_range and first > last):
        what = f"--control-vector-layer-range is {first} to {wanted}"
        raise ConfigError(
            f"{what}, but the model's last layer is {last}.", field="control_vector_layer_range"
        )
    return first, min(wanted, last)


def read_directions(settings: EngineSettings, model: GgufHeader) -> Directions | None:
    """The scaled sum of the control vectors, shape (layers - 1, embedding_length); `None` without
    any. Row i is added to the output of layer i + 1.

    Raises:
        ModelError: a file does not exist, or is not a control vector of this model.
        ConfigError: as `layers_of`.
    """
    if not settings.control_vector:
        return None
    first, last = layers_of(settings, model)
    total = np.zeros(((model.block_count or 1) - 1, model.embedding_length or 0), np.float32)
    for vector in settings.control_vectors:
        path = Path(os.path.expanduser(vector.path))
        with of_flag("--control-vector"):
            _add(total, read_layout(path), vector.scale, model)
    total[: first - 1] = 0
    total[last:] = 0
    return total


def _add(total: Directions, layout: GgufLayout, scale: float, model: GgufHeader) -> None:
    n_layers, width = total.shape
    path = str(layout.path)
    if not layout.tensors:
        raise ModelError(f"{path!r} is not a control vector: it has no direction.", path=path)
    for tensor in layout.tensors:
        match = _NAME.fullmatch(tensor.name)
        if match is None or tensor.type_name != "F32" or len(tensor.shape) != 1:
            raise ModelError(
                f"{path!r} is not a control vector: its tensor {tensor.name!r} is not a "
                "direction.N with one dimension and the type F32.",
                path=path,
            )
        layer = int(match[1])
        if layer > n_layers or tensor.shape != (width,):
            raise ModelError(
                f"The control vector {path!r} is not for {str(model.path)!r}: "
                f"{tensor.name!r} has {tensor.shape[0]} numbers, where the layers 1 to {n_layers} "
                f"have {width}.",
                path=path,
            )
        direction = np.fromfile(layout.path, "<f4", width, offset=tensor.offset)
        if not np.isfinite(direction).all():
            text = f"The control vector {path!r} is not finite in {tensor.name!r}."
            raise ModelError(text, path=path)
        total[layer - 1] += np.float32(scale) * direction
