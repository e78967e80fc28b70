"""Settings that name what is no file: each ends the worker with its exit code and a sentence."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from tests.support.worker import run_to_exit
from worker.errors import ModelError
from worker.models.resolve import resolve
from worker.settings import Settings

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
def test_odd_names_are_refused_with_a_sentence(folder: Path, name: str) -> None:
    with pytest.raises(ModelError, match=ODD[name]):
        asyncio.run(asyncio.wait_for(resolve(Settings(cache_dir=folder / "cache"), name), 60))


def test_a_checkpoint_of_pipes_is_none(folder: Path) -> None:
    (folder / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        os.mkfifo(folder / "model" / name)
    with pytest.raises(ModelError, match=r"it has no config.json"):
        asyncio.run(asyncio.wait_for(resolve(Settings(cache_dir=folder / "cache"), "./model"), 60))


@pytest.mark.parametrize(
    ("flag", "code"),
    [("--chat-template", 2), ("--config", 2), ("--models-file", 2), ("--lora", 3)],
)
def test_no_setting_waits_for_a_pipe(folder: Path, flag: str, code: int) -> None:
    more = ("--model", "alias") if flag == "--models-file" else ()
    ended = run_to_exit("--port", "0", flag, str(folder / "fifo.gguf"), *more, cache_dir=folder)
    assert ended.code == code
    assert "not a file" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
