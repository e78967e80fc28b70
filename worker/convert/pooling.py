"""Reads from the files of sentence-transformers how token vectors become one embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from gguf.constants import PoolingType

from worker.convert.checkpoint import Checkpoint
from worker.errors import ModelError
from worker.models.checkpoint_files import DENSE_MODULES, is_pooling_config, read_json

MODULES = "modules.json"
_FLAGS = {
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_cls_token": PoolingType.CLS,
    "pooling_mode_lasttoken": PoolingType.LAST,
}
_NAMES = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "lasttoken": PoolingType.LAST}


def read_pooling(checkpoint: Checkpoint) -> PoolingType | None:
    """The model's pooling; `None` if the checkpoint has no files of sentence-transformers.

    Raises:
        ModelError: llama.cpp has no such pooling, or no such further module.
    """
    path = checkpoint.folder / MODULES
    if not path.is_file():
        return None
    found = None
    for module in _modules(path):
        kind = str(module.get("type")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            file = checkpoint.folder / str(module.get("path")) / "config.json"
            if not is_pooling_config(file) or file.parent.parent != checkpoint.folder:
                raise ModelError(f"{path}: the folder of its pooling must be named like 1_Pooling")
            found = _pooling(file)
        elif kind == "Dense":
            _check_dense(checkpoint.folder / str(module.get("path")))
        elif kind not in ("Transformer", "Normalize"):
            raise ModelError(f"{path}: the module {kind} cannot be converted")
    return found


def _check_dense(folder: Path) -> None:
    settings = read_json(folder / "config.json")
    activation = str(settings.get("activation_function")).rsplit(".", 1)[-1]
    if settings.get("bias") or activation != "Identity" or folder.name not in DENSE_MODULES:
        raise ModelError(
            f"{folder}: llama.cpp implements dense modules only as plain matrices, in "
            f"{' and '.join(DENSE_MODULES)}, without a bias or an activation"
        )


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} must hold a list of modules: {error}", path=str(path)) from None


def _pooling(path: Path) -> PoolingType:
    settings = read_json(path)
    chosen = [kind for flag, kind in _FLAGS.items() if settings.get(flag)]
    others = [key for key, on in settings.items() if key.startswith("pooling_mode_") and on is True]
    if not others and settings.get("pooling_mode") in _NAMES:
        return _NAMES[settings["pooling_mode"]]
    if len(chosen) != 1 or len(others) != 1:
        raise ModelError(f"{path}: llama.cpp pools by mean, CLS or last token, not by several")
    return chosen[0]
