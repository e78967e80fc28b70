"""Resolves any model reference to a local GGUF, checked before a native loader sees it.

Runs on the API process's event loop during the start. Slow work goes to a thread or a child
process, so `/health` and `/ready` answer meanwhile. The progress callback is called on the loop or
on another thread, and should only store its argument.
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
from worker.models.checkpoint_files import check_checkpoint, check_exists
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
    """The reference as the user wrote it, for `/health` and the pool manager."""
    kind: Literal["bundled", "gguf", "safetensors", "hub"]
    projector: Path | None = None
    """The projector for pictures and sounds that came from its repository."""

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
    """Find, download or convert the model that `ref` names; `None` means the bundled model.

    The settings name the cache, the models file and the type of converted weights. `room` returns
    the bytes of memory by which one of a repository's quantisations is chosen. The main model's
    projector is downloaded with it, if its repository has one and `--mmproj` is not set.

    Raises `ModelError` (missing, corrupt, unsupported), `DownloadError` or `ConfigError`.
    """
    on_progress(Progress("resolve", 0.0))
    place, sha256 = await asyncio.to_thread(look_up, ref, settings.models_file)
    if ref is None or place is None:
        bundled = await _resolve_path(bundled_folder(), BUNDLED, settings, on_progress)
        return replace(bundled, kind="bundled")
    if isinstance(place, Path):
        return await _resolve_path(place.absolute(), ref, settings, on_progress)
    from worker.models.hub.download import download  # not needed for local models

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
    """Find or download the SafeTensors folder that `ref` names.

    Raises `ModelError` if `ref` names a GGUF or nothing that exists, otherwise as `resolve` does.
    """
    place, sha256 = await asyncio.to_thread(look_up, ref, models_file, reference.CHECKPOINTS)
    if place.is_gguf if isinstance(place, HubReference) else os.path.isfile(place or ""):
        is_gguf = isinstance(place, HubReference) or str(place).endswith(".gguf")
        what = "a GGUF, which the worker serves unconverted" if is_gguf else "a file"
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
    """The place of a model (`None`: the bundled one), and its SHA-256 if it is pinned.

    An alias takes precedence over a path of the same name. Errors name the accepted `forms`.
    """
    if ref is None:
        return None, None
    parsed = reference.parse(ref, forms)
    if isinstance(parsed, Path) and is_like_repository(ref) and not os.path.lexists(parsed):
        raise ModelError(f"{ref!r} is not a path on this machine; for a repository give hf:{ref}.")
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
    if await asyncio.to_thread(os.path.isdir, path):  # false for a malformed path
        header = await convert_cached(
            path,
            cache_dir=settings.cache_path,
            outtype=settings.outtype,
            on_progress=on_progress,
            name=name_of(path),
        )
        return ResolvedModel(header, ref, "safetensors")
    await asyncio.to_thread(check_exists, path)
    header = await asyncio.to_thread(read_header, path)
    check_servable(header)
    return ResolvedModel(header, ref, "gguf")
