"""Loads the projector at the engine's start: planned with the model, proven resident like it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from worker.devices.residency import projector as proof
from worker.devices.select import Selected
from worker.errors import ModelError
from worker.llama.media import Projector
from worker.llama.model import Model
from worker.models.gguf.header import read_header
from worker.wire.engine_info import ProjectorInfo, Residency
from worker.wire.messages import ProjectorFile

_PROBE = 64
"""Pixels of each side of a picture that shows which tokens stand around its parts."""


@dataclass(frozen=True, slots=True)
class Senses:
    projector: Projector
    info: ProjectorInfo
    residency: Residency
    """Of the model and the projector."""


def start_projector(
    file: ProjectorFile, model: Model, residency: Residency, selected: Selected, threads: int
) -> Senses:
    """
    Raises:
        ModelError: the projector cannot be loaded, or does not go with the model.
        ResidencyViolation: it is not on the model's device.
    """
    header = read_header(Path(file.path))
    projector = Projector(
        model, file.path, selected.devices[0] if selected.is_gpu else None, threads
    )
    if projector.has_four_positions:
        raise _unusable(
            file, "its pictures have positions in time and space (M-RoPE), which is not served yet"
        )
    if projector.sees:
        pieces = projector.picture(_PROBE, _PROBE, bytes(3 * _PROBE * _PROBE))
        tokens = [token for piece in pieces if isinstance(piece, tuple) for token in piece]
        if min(tokens, default=0) < 0:
            raise _unusable(file, "the model's vocabulary lacks tokens that stand around a picture")
    buffers = proof.prove(projector.load_log, selected, header)
    kind = header.metadata.get("clip.projector_type") or header.metadata.get(
        "clip.vision.projector_type", ""
    )
    info = ProjectorInfo(
        Path(file.path).name, str(kind), projector.sees, projector.hears, header.tensor_bytes
    )
    return Senses(projector, info, replace(residency, buffers=residency.buffers + buffers))


def _unusable(file: ProjectorFile, why: str) -> ModelError:
    return ModelError(
        f"The projector {file.path!r} cannot be used: {why}; start with --no-mmproj to serve text.",
        path=file.path,
    )
