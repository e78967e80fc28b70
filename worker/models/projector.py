"""Finds the model's projector: that of `--mmproj`, of its repository, or the one beside its file.

Blocking; runs in a thread of the API process, and in commands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from worker.errors import ModelError
from worker.models.gguf.header import GgufHeader, read_header, with_metadata
from worker.models.gguf.layout import Scalar
from worker.models.gguf.servable import check_types
from worker.models.reference import is_projector
from worker.models.resolve import ResolvedModel
from worker.observability.logs import get_logger
from worker.settings import Settings
from worker.wire.messages import ProjectorFile

ARCHITECTURE = "clip"
NONE = "none"
"""Value of the setting for text only, whatever lies beside the model."""

log = get_logger()


def resolve_projector(settings: Settings, model: ResolvedModel) -> ProjectorFile | None:
    """The projector that the settings name; else that of the model's repository; else the only
    one that fits beside the model's file. `None` if there is none, or several fit.

    Raises `ModelError` if the named one cannot be read or does not fit the model.
    """
    wanted = settings.mmproj
    if wanted == NONE:
        return None
    # They may turn a generating model into an embedding one.
    overrides = settings.engine.overrides
    if wanted is not None:
        path = Path(os.path.expanduser(wanted)).absolute()
        if (fault := _fault(path, model.header, overrides)) is not None:
            what = f"is not a projector for {str(model.gguf_path)!r}: {fault}."
            raise ModelError(f"{str(path)!r} {what}", path=str(path))
        return ProjectorFile(str(path), is_named=True)
    fitting = []
    for path in _beside(model):
        try:
            fault = _fault(path, model.header, overrides)
        except ModelError as error:
            fault = error.message
        if fault is None:
            fitting.append(path)
        else:
            log.warning("projector.passed_over", file=path.name, reason=fault)
    if len(fitting) > 1:
        names = [path.name for path in fitting]
        log.warning("projector.not_chosen", files=names, hint="name one with --mmproj")
    return ProjectorFile(str(fitting[0]), is_named=False) if len(fitting) == 1 else None


def _beside(model: ResolvedModel) -> list[Path]:
    """The projector of the model's repository, or else those in the model's folder."""
    if model.projector is not None:
        return [model.projector]
    files = sorted(model.gguf_path.parent.glob("*.gguf"))
    return [path for path in files if path != model.gguf_path and is_projector(path.name)]


def _fault(path: Path, model: GgufHeader, overrides: Mapping[str, Scalar]) -> str | None:
    """Why a file cannot be the model's projector; `None` if it can."""
    header, model = read_header(path), with_metadata(model, overrides)
    if header.architecture != ARCHITECTURE:
        return f"it holds a model of the architecture {header.architecture}"
    check_types(header)
    if model.pooling is not None:
        return "the model is an embedding model, which takes only text"
    widths = {
        value
        for side in ("vision", "audio")
        if isinstance(value := header.metadata.get(f"clip.{side}.projection_dim"), int)
    }
    if widths and model.embedding_length not in widths:
        made = ", ".join(map(str, sorted(widths)))
        return f"it makes embeddings of {made} numbers, the model takes {model.embedding_length}"
    return None
