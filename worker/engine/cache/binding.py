"""What an engine's states depend on: engines that share all of it can use each other's files.

Runs on the engine's main thread; a thread of the store hashes the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

from worker.engine.cache.disk import Binding, Disk
from worker.errors import ConfigError
from worker.llama.memory_kind import MemoryKind
from worker.models.checksum import sha256_of_file
from worker.models.gguf.header import GgufHeader
from worker.observability.logs import get_logger
from worker.wire.engine_info import EngineInfo
from worker.wire.engine_settings import EngineSettings

_FORMAT = 4
"""The version of `disk_file`'s format; it must change with the content of the files."""


def open_disk(
    header: GgufHeader,
    settings: EngineSettings,
    info: EngineInfo,
    kind: MemoryKind,
    projector: Path | None,
) -> Disk | None:
    """The third tier of the engine's cache; `None` if states are not to be stored, or if the folder
    has become unusable since the start, which checked it."""
    if settings.kv_store is None or info.kv_store_bytes is None:
        return None

    def bind(hashes: Path) -> Binding:
        """Hash the model, which takes seconds per gigabyte, or find the hash that was stored in the
        folder `hashes`. Raises `OSError` if a file cannot be read."""
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
            "split_into": 1 if kind.moves_states else n_parts,
            "longest": longest if header.lengths_differ else None,
        }
        binding = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        adapters = (Path(adapter.path) for adapter in info.model.adapters)
        return binding, [sha256_of_file(path, hashes) for path in adapters]

    folder = Path(os.path.expanduser(settings.kv_store))
    try:
        return Disk(folder, info.kv_store_bytes, kind, bind)
    except ConfigError as error:
        get_logger().warning("kv_store.unusable", reason=error.message)
        return None
