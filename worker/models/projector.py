"""`--mmproj FILE` in, a local projector out that fits the model; without it, that of the model's
repository, or the one beside the model.

Blocking; runs in a thread of the API process, and in commands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
"""Of the setting: text only, whatever lies beside the model."""

log = get_logger()


def resolve_projector(settings: Settings, model: ResolvedModel) -> ProjectorFile | None:
    """The projector that the settings name; without one, that of the model's repository, or else
    the only one beside the model that fits.

    Raises `ModelError` if the named one cannot be read or does not fit the model.
    """
    wanted, path = settings.mmproj, model.gguf_path
    if wanted == NONE:
        return None
    overrides = settings.engine.overrides  # by which a model that generates may embed, too
    if wanted is None:
        beside = [each for each in sorted(path.parent.glob("*.gguf")) if each != path]
        found = [each for each in beside if is_projector(each.name)]
        paths = [model.projector] if model.projector is not None else found
        return _only_fitting(paths, model.header, overrides)
    return _named(Path(os.path.expanduser(wanted)).absolute(), model.header, overrides)


def _named(path: Path, model: GgufHeader, overrides: Mapping[str, Scalar]) -> ProjectorFile:
    header = read_header(path)
    fault = _fault(header, with_metadata(model, overrides))
    if fault is not None:
        raise ModelError(
            f"{str(path)!r} is no projector for {str(model.path)!r}: {fault}.", path=str(path)
        )
    return ProjectorFile(str(path), is_named=True)


def _only_fitting(
    paths: Sequence[Path], model: GgufHeader, overrides: Mapping[str, Scalar]
) -> ProjectorFile | None:
    if not paths:
        return None
    model, fitting = with_metadata(model, overrides), []
    for path in paths:
        try:
            header = read_header(path)
            fault = _fault(header, model)
        except ModelError as error:
            fault = error.message
        if fault is None:
            fitting.append(ProjectorFile(str(path), is_named=False))
        else:
            log.warning("projector.passed_over", file=path.name, reason=fault)
    if len(fitting) > 1:
        names = [Path(each.path).name for each in fitting]
        log.warning("projector.not_chosen", files=names, hint="name one with --mmproj")
    return fitting[0] if len(fitting) == 1 else None


def _fault(header: GgufHeader, model: GgufHeader) -> str | None:
    """Why a file is no projector for the model."""
    if header.architecture != ARCHITECTURE:
        return f"it holds a model of the architecture {header.architecture}"
    check_types(header)
    if model.pooling is not None:
        return "the model embeds texts and takes nothing else"
    widths = {
        value
        for side in ("vision", "audio")
        if isinstance(value := header.metadata.get(f"clip.{side}.projection_dim"), int)
    }
    if widths and model.embedding_length not in widths:
        given = ", ".join(map(str, sorted(widths)))
        return f"it makes embeddings of {given} numbers, the model takes {model.embedding_length}"
    return None
