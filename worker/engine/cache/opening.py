"""Opens the disk tier of an engine: its folder, and what the engine's states depend on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from worker.engine.backend import Backend
from worker.engine.cache.disk import Disk
from worker.models.checksum import sha256_of_file
from worker.models.gguf.header import GgufHeader
from worker.wire.engine_info import EngineInfo
from worker.wire.engine_settings import EngineSettings

_FORMAT = 3
"""The format's version; it must change with the content of the files."""


def open_disk(
    header: GgufHeader,
    settings: EngineSettings,
    info: EngineInfo,
    backend: Backend,
    projector: Path | None = None,
) -> Disk | None:
    """The third tier of the engine's cache; `None` if states are not to be stored.

    Raises:
        ConfigError: the folder cannot be used, or other users could put files into it.
    """
    if settings.kv_store is None or info.kv_store_bytes is None:
        return None
    return Disk(
        Path(os.path.expanduser(settings.kv_store)),
        info.kv_store_bytes,
        backend.memory_kind,
        bind=lambda folder: _binding(
            header, settings, info, folder, projector, backend.memory_kind.moves_states
        ),
        hash_adapters=lambda folder: [
            sha256_of_file(Path(adapter.path), folder) for adapter in info.model.adapters
        ],
    )


def _binding(
    header: GgufHeader,
    settings: EngineSettings,
    info: EngineInfo,
    hashes: Path,
    projector: Path | None,
    moves_states: bool,
) -> str:
    """A hash of what all states depend on; only engines with the same one may read them.

    Hashes the model, which takes seconds per gigabyte, or finds the hash that was stored under
    `hashes`.

    Raises:
        OSError: a file of the model cannot be read.
    """
    n_parts = 1 if info.kv_unified else info.slots
    longest = info.kv_cells // n_parts
    parts = {
        "format": _FORMAT,
        "byteorder": sys.byteorder,
        "versions": {name: v for name, v in info.versions.items() if name != "python"},
        "backend": info.backend,
        "model": [sha256_of_file(path, hashes) for path in header.parts],
        "projector": [sha256_of_file(projector, hashes)] if projector is not None else None,
        "kv_types": settings.kv_types,
        "rope": settings.rope,
        "metadata": header.overridden,
        "control": info.model.control.sha256 if info.model.control is not None else None,
        "flash_attention": settings.flash_attention,
        "split_into": 1 if moves_states else n_parts,
        "longest": longest if header.lengths_differ else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
