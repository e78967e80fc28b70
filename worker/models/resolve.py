"""Resolves any model reference to a local GGUF, checked before a native loader sees it.

Runs on the API process's event loop during the start. Slow work goes to a thread or a child
process, so `/health` and `/ready` answer meanwhile. The progress callback is called on the loop or
on a helper thread, and should only store its argument.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from worker.errors import ModelError
from worker.installation import default_cache_dir
from worker.models import reference, registry
from worker.models.checkpoint_files import check_checkpoint
from worker.models.conversion import convert_cached
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_servable
from worker.models.reference import HubReference, PathReference, Reference, name_of
from worker.models.registry import RegistryEntry
from worker.wire.messages import OnProgress, Progress

if TYPE_CHECKING:
    from worker.models.hub.download import Downloaded

BUNDLED = "tiny-model"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine whose header has been checked."""

    gguf_path: Path
    """The first part, if the model is split."""
    model_ref: str
    """The reference that the user gave, as `/health` and the pool manager show it."""
    kind: Literal["bundled", "gguf", "safetensors", "hub"]
    header: GgufHeader | None = None
    """Where it was read just now."""


def bundled_folder() -> Path:
    folder = Path(str(importlib.resources.files("worker") / "assets" / BUNDLED))
    if not folder.is_dir():
        raise ModelError(f"The bundled model is missing from the installation ({folder}).")
    return folder


async def resolve(
    ref: str | None,
    *,
    models_file: Path | None = None,
    cache_dir: Path | None = None,
    outtype: str = "q8_0",
    on_progress: OnProgress = lambda progress: None,
) -> ResolvedModel:
    """Find, download or convert the model that `ref` names; `None` means the bundled model.

    Raises `ModelError` (missing, corrupt, unsupported), `DownloadError` or `ConfigError`.
    """
    cache = (cache_dir or default_cache_dir()).absolute()
    on_progress(Progress("resolve", 0.0))
    if ref is None or ref == BUNDLED:
        found = await _resolve_path(bundled_folder(), BUNDLED, cache, outtype, on_progress)
        return replace(found, kind="bundled")
    target = await asyncio.to_thread(_look_up, reference.parse(ref), models_file)
    if target.bundled:
        return await resolve(None, cache_dir=cache, outtype=outtype, on_progress=on_progress)
    if target.hub is None:
        assert target.path is not None
        return await _resolve_path(target.path.absolute(), ref, cache, outtype, on_progress)
    downloaded = await _download(target, cache, on_progress)
    local = await _resolve_path(downloaded.path, ref, cache, outtype, on_progress)
    return replace(local, kind="hub")


async def resolve_checkpoint(
    ref: str,
    *,
    models_file: Path | None = None,
    cache_dir: Path | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Path:
    """Find or download the SafeTensors folder that `ref` names, in any form.

    Raises `ModelError` if it names a GGUF or nothing, otherwise as `resolve` does.
    """
    target = await asyncio.to_thread(_look_up, reference.parse(ref), models_file)
    path = target.path.absolute() if target.path is not None else None
    if (target.hub is not None and target.hub.file is not None) or (path and os.path.isfile(path)):
        raise ModelError(
            f"{ref!r} is a file; the converter needs a folder or a repository of SafeTensors."
        )
    if target.hub is not None:
        cache = (cache_dir or default_cache_dir()).absolute()
        path = (await _download(target, cache, on_progress, safetensors_only=True)).path
    folder = path or bundled_folder()
    await asyncio.to_thread(check_checkpoint, folder)
    return folder


async def _download(
    target: RegistryEntry, cache: Path, on_progress: OnProgress, safetensors_only: bool = False
) -> Downloaded:
    # A model on this machine does not need these imports.
    from worker.models.hub.download import download

    assert target.hub is not None
    return await download(
        target.hub,
        cache_dir=cache,
        sha256=target.sha256,
        on_progress=on_progress,
        safetensors_only=safetensors_only,
    )


def _look_up(parsed: Reference, models_file: Path | None) -> RegistryEntry:
    """Any reference as a registry entry; an alias precedes a path of the same name."""
    if isinstance(parsed, HubReference):
        return RegistryEntry(alias="", hub=parsed)
    if isinstance(parsed, PathReference):
        return RegistryEntry(alias="", path=parsed.path)
    known = registry.load(models_file)
    path = Path(parsed.alias)
    if parsed.alias == BUNDLED and BUNDLED not in known.entries:
        return RegistryEntry(alias=BUNDLED, bundled=True)
    if parsed.alias not in known.entries and os.path.exists(path):
        return RegistryEntry(alias="", path=path)
    return known.find(parsed.alias)


async def _resolve_path(
    path: Path, ref: str, cache: Path, outtype: str, on_progress: OnProgress
) -> ResolvedModel:
    if await asyncio.to_thread(os.path.isdir, path):  # false for any odd name, without an error
        converted = await convert_cached(
            path, cache_dir=cache, outtype=outtype, on_progress=on_progress, name=name_of(path)
        )
        return ResolvedModel(converted, ref, "safetensors")
    header = await asyncio.to_thread(read_header, path)
    check_servable(header)
    return ResolvedModel(path, ref, "gguf", header)
