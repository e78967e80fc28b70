"""Adapter folders, converted for the model that is served."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests import DATA
from tests.support.bundled import bundled_gguf
from worker.errors import ModelError
from worker.models.adapter import resolve_adapters
from worker.models.gguf.header import read_header
from worker.models.resolve import resolve
from worker.settings import Settings
from worker.wire.adapters import parse_adapter

ADAPTER = DATA / "adapter"


def test_an_adapter_that_cannot_be_converted_is_refused_with_its_flag(tmp_path: Path) -> None:
    shutil.copytree(ADAPTER, tmp_path / "saves")
    settings = tmp_path / "saves/adapter_config.json"
    whole = '"modules_to_save": ["lm_head"]'
    settings.write_text(settings.read_text().replace('"modules_to_save": null', whole))
    wanted = [parse_adapter(str(tmp_path / "saves"))]
    with pytest.raises(ModelError, match="^--lora: .*whole modules"):
        asyncio.run(resolve_adapters(wanted, read_header(bundled_gguf("f32")), tmp_path))


def test_an_adapter_folder_is_converted_once_and_again_if_its_file_is_damaged(
    tmp_path: Path, warm_cache: Path
) -> None:
    """Like a checkpoint: by one of the workers that start at once, and never partially."""

    async def resolved() -> tuple[set[str], set[str]]:
        base = (await resolve(Settings(cache_dir=warm_cache), None)).header
        phases: set[str] = set()
        wanted = [parse_adapter(str(ADAPTER))]
        found = await asyncio.gather(
            *(
                resolve_adapters(wanted, base, tmp_path, lambda step: phases.add(step.phase))
                for _ in range(2)
            )
        )
        return {adapter.path for adapters in found for adapter in adapters}, phases

    (path,), phases = asyncio.run(resolved())
    assert "waiting for another worker's conversion" in phases
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    assert asyncio.run(resolved())[0] == {path}
    assert Path(path).read_bytes() == whole
