"""Resolves any model reference to a local GGUF, checked before a native loader sees it.

Runs on the API process's event loop during the start. Slow work goes to a thread or a child
process, so `/health` and `/ready` answer meanwhile. The progress callback is called on the loop or
on a helper thread, and should only store its argument.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from worker.errors import ModelError
from worker.models import reference, registry
from worker.models.checkpoint_files import check_checkpoint, check_there
from worker.models.conversion import convert_cached
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_servable
from worker.models.reference import HubReference, is_like_repository, name_of
from worker.settings import Settings
from worker.wire.messages import OnProgress, Progress

BUNDLED = "tiny-model"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine whose header has been checked."""

    header: GgufHeader
    model_ref: str
    """The reference that the user gave, as `/health` and the pool manager show it."""
    kind: Literal["bundled", "gguf", "safetensors", "hub"]
    projector: Path | None = None
    """The file that its repository has to see and hear with."""

    @property
    def gguf_path(self) -> Path:
        """The first part, if the model is split."""
        return self.header.path


def bundled_folder() -> Path:
    folder = Path(str(importlib.resources.files("worker") / "assets" / BUNDLED))
    if not folder.is_dir():
        raise ModelError(f"The bundled model is missing from the installation ({folder}).")
    return folder


async def resolve(
    settings: Settings,
    ref: str | None,
    on_progress: OnProgress = lambda progress: None,
    room: Callable[[], int] | None = None,
) -> ResolvedModel:
    """Find, download or convert the model that `ref` names, with the places and the weight type
    that the settings name; `None` means the bundled model.

    `room` tells the bytes of memory by which one of a repository's quantisations is chosen. What
    the repository has to see and hear with comes too, unless the settings name a projector.

    Raises `ModelError` (missing, corrupt, unsupported), `DownloadError` or `ConfigError`.
    """
    on_progress(Progress("resolve", 0.0))
    place, sha256 = await asyncio.to_thread(look_up, ref, settings.models_file)
    if ref is None or place is None:
        bundled = await _resolve_path(bundled_folder(), BUNDLED, settings, on_progress)
        return replace(bundled, kind="bundled")
    if isinstance(place, Path):
        return await _resolve_path(place.absolute(), ref, settings, on_progress)
    from worker.models.hub.download import download  # A model on this machine needs it not.

    fetched = await download(
        place,
        cache_dir=settings.cache_path,
        sha256=sha256,
        on_progress=on_progress,
        room=room,
        projector=ref == settings.model and settings.mmproj is None,
    )
    local = await _resolve_path(fetched.path, ref, settings, on_progress)
    return replace(local, kind="hub", projector=fetched.projector)


async def resolve_checkpoint(
    ref: str,
    models_file: Path | None,
    cache_dir: Path,
    on_progress: OnProgress = lambda progress: None,
) -> Path:
    """Find or download the SafeTensors folder that `ref` names, in any form.

    Raises `ModelError` if it names a GGUF or nothing, otherwise as `resolve` does.
    """
    place, sha256 = await asyncio.to_thread(look_up, ref, models_file, reference.CHECKPOINTS)
    if place.is_gguf if isinstance(place, HubReference) else os.path.isfile(place or ""):
        is_gguf = isinstance(place, HubReference) or str(place).endswith(".gguf")
        what = "a GGUF, which the worker takes as it is" if is_gguf else "a file"
        raise ModelError(
            f"{ref!r} is {what}; the converter needs a folder or a repository of SafeTensors."
        )
    if isinstance(place, HubReference):
        from worker.models.hub.download import download

        found = await download(
            place,
            cache_dir=cache_dir.absolute(),
            sha256=sha256,
            on_progress=on_progress,
            safetensors_only=True,
        )
        folder = found.path
    else:
        folder = bundled_folder() if place is None else place.absolute()
    await asyncio.to_thread(check_checkpoint, folder)
    return folder


def look_up(
    ref: str | None, models_file: Path | None, forms: str = reference.FORMS
) -> tuple[HubReference | Path | None, str | None]:
    """Where a model is, and its SHA-256 if it is pinned; `None` is the bundled one, and its place.

    An alias precedes a path of the same name. A fault names the `forms` that would be right.
    """
    if ref is None:
        return None, None
    parsed = reference.parse(ref, forms)
    if isinstance(parsed, Path) and is_like_repository(ref) and not os.path.lexists(parsed):
        raise ModelError(f"{ref!r} is no path on this machine; for a repository give hf:{ref}.")
    if not isinstance(parsed, str):
        return parsed, None
    known = registry.load(models_file)
    if parsed not in known.entries:
        if parsed == BUNDLED:
            return None, None
        if os.path.exists(parsed):
            return Path(parsed), None
    entry = known.find(parsed, forms)
    return entry.hub or (Path(entry.path) if entry.path else None), entry.sha256


async def _resolve_path(
    path: Path, ref: str, settings: Settings, on_progress: OnProgress
) -> ResolvedModel:
    if await asyncio.to_thread(os.path.isdir, path):  # false for any odd name, without an error
        header = await convert_cached(
            path,
            cache_dir=settings.cache_path,
            outtype=settings.outtype,
            on_progress=on_progress,
            name=name_of(path),
        )
        return ResolvedModel(header, ref, "safetensors")
    await asyncio.to_thread(check_there, path)
    header = await asyncio.to_thread(read_header, path)
    check_servable(header)
    return ResolvedModel(header, ref, "gguf")
