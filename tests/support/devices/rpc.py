"""Starts and stops the processes that stand in for a GPU."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.ports import free_port
from tests.support.worker import until
from worker.devices.select import wheel_stamp
from worker.llama import library

PLUGIN = "libggml-rpc.so"


def plugin_path() -> Path:
    """The RPC plug-in: beside the wheel, or inside it if the wheel is not ours."""
    for folder in (Path(sys.prefix) / "test-plugins", library.folder()):
        if (folder / PLUGIN).is_file():
            return folder / PLUGIN
    if wheel_stamp().get("backend", "cpu") != "cpu":
        pytest.skip("only the CPU wheel comes with the test device's plug-in")
    pytest.fail(f"{PLUGIN} is neither beside nor in the wheel; `make setup` builds it")


@contextmanager
def serve(free_bytes: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a test device; yields its name for `rpc_device` and `cuda_command`, and its process.

    It claims to have `free_bytes`, or the machine's real memory. It serves one client at a time, so
    each process needs a device of its own.
    """
    plugin = plugin_path()
    port = free_port()
    command = ["-m", "tests.support.devices.rpc_server", str(plugin), f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        [sys.executable, *command, str(free_bytes)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _is_listening(port), lambda: f"exit code {process.poll()}")
        yield f"{plugin}@127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def cuda_command(setting: str) -> list[str]:
    """`llorch-cuda`, whose engine uses that device."""
    return [sys.executable, "-m", "tests.support.devices.gpu_command", setting]


def _is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
