"""Settings that name something other than a file: each is refused with a message."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.samples import write_gguf
from worker.errors import ConfigError, ModelError
from worker.models import registry
from worker.models.adapter import resolve_adapters
from worker.models.gguf.header import read_header
from worker.models.resolve import resolve
from worker.settings import Settings
from worker.wire.adapters import parse_adapter

ODD = {
    "/dev/zero": "not a file but a device or a pipe",
    "/dev/null": "not a file but a device or a pipe",
    "fifo.gguf": "not a file but a device or a pipe",
    "socket.gguf": "cannot be read",
    "x" * 300: "not in",
    "x" * 300 + ".gguf": "File name too long",
    "/" + "x/" * 3000: "File name too long",
    "loop.gguf": "cannot be read",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.gguf")
    return tmp_path


@pytest.mark.parametrize("name", list(ODD), ids=lambda name: name[:16])
def test_odd_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ModelError, match=ODD[name]):
        asyncio.run(asyncio.wait_for(resolve(Settings(cache_dir=folder / "cache"), name), 60))


def test_a_checkpoint_of_pipes_is_refused(folder: Path) -> None:
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        os.mkfifo(folder / "model" / name)
    with pytest.raises(ModelError, match=r"tokenizer.json is not a file"):
        asyncio.run(asyncio.wait_for(resolve(Settings(cache_dir=folder / "cache"), "./model"), 60))


def test_no_setting_waits_for_a_pipe(folder: Path) -> None:
    fifo = str(folder / "fifo.gguf")
    reads: dict[str, Callable[[], object]] = {
        "chat_template": lambda: Settings.load("cpu", {"chat_template": fifo}).check_files(),
        "config": lambda: Settings.load("cpu", {"config": fifo}),
        "models_file": lambda: registry.load(Path(fifo)),
    }
    for field, read in reads.items():
        with pytest.raises(ConfigError, match="not a file") as refused:
            read()
        assert refused.value.details["field"] == field
    model = read_header(write_gguf(folder / "m.gguf"))
    with pytest.raises(ModelError, match="^--lora: .*not a file"):
        asyncio.run(resolve_adapters([parse_adapter(fifo)], model, folder))
