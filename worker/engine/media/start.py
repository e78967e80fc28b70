"""Loads the projector at the engine's start: planned with the model, proven resident like it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.devices.plan.projector import kind_of, most_tokens
from worker.devices.residency import projector as proof
from worker.devices.select import Selected
from worker.errors import ModelError, WorkerError
from worker.llama import library
from worker.llama.media import Projector
from worker.llama.model import Model
from worker.models.gguf.header import GgufHeader, read_header
from worker.observability.logs import get_logger
from worker.wire.engine_info import ProjectorInfo, Residency
from worker.wire.messages import ProjectorFile

log = get_logger()

_COUNTED = frozenset({"hunyuanvl"})
"""Kinds for which a picture's place among the prompt's other pictures matters."""
_PROBE = 64
"""The side, in pixels, of a picture that shows which tokens surround its parts."""


def start_projector(
    file: ProjectorFile | None,
    model: Model,
    residency: Residency,
    selected: Selected,
    threads: int,
    pulse: memoryview,
) -> tuple[Projector | None, ProjectorInfo | None, Residency]:
    """The projector, if there is one that can be used, and the residency with it.

    Raises:
        ModelError: the one that the user named cannot be loaded, or does not fit the model.
        ResidencyViolation: it is not on the model's device.
    """
    if file is None:
        return None, None, residency
    projector = None
    try:
        header = read_header(Path(file.path))
        device = selected.devices[0] if selected.is_gpu else None
        with library.working_on(f"the projector {file.path!r}"):
            projector = Projector(
                *(model, file.path, device, threads, most_tokens(header), line_break_of(header)),
                pulse=pulse,
            )
            info = _checked(file, projector, header)
        buffers = residency.buffers + proof.prove(projector.load_log, selected, header)
        return projector, info, replace(residency, buffers=buffers)
    except WorkerError as error:
        if projector is not None:
            projector.close()
        if file.is_named:
            raise
        log.warning("engine.projector_passed_over", reason=error.message)
        return None, None, residency


def _checked(file: ProjectorFile, projector: Projector, header: GgufHeader) -> ProjectorInfo:
    tokens: list[int] = []
    if projector.sees:
        pieces = projector.picture(_PROBE, _PROBE, bytes(3 * _PROBE * _PROBE))
        tokens = [token for piece in pieces if isinstance(piece, tuple) for token in piece]
    kind, why = kind_of(header), ""
    if min(tokens, default=0) < 0:
        why = "the model's vocabulary lacks tokens that surround a picture"
    elif kind in _COUNTED:
        why = f"{kind} counts a prompt's pictures, which is not supported"
    if why:
        what = f"The projector {file.path!r} cannot be used: {why}"
        raise ModelError(f"{what}; start with --no-mmproj to serve text.", path=file.path)
    name = Path(file.path).name
    return ProjectorInfo(name, kind, projector.sees, projector.hears, header.tensor_bytes)


def line_break_of(header: GgufHeader) -> npt.NDArray[np.float32] | None:
    """The embedding that libmtmd puts between a picture's lines: (width of the model,)."""
    for tensor in header.tensors:
        if (tensor.name, tensor.type_name) == ("v.token_embd.img_break", "F32"):
            return np.fromfile(header.path, "<f4", tensor.n_elements, offset=tensor.offset)
    return None
