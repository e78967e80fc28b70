"""A file system in memory that a test can fill up or make read-only, and the locks of NFS."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_flock = fcntl.flock


def flock_of_nfs(file: int | IO[bytes], how: int) -> None:
    """Refuse an exclusive lock of a file that is not open for writing, as NFS does (flock(2))."""
    is_open_for_reading = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    if how & fcntl.LOCK_EX and is_open_for_reading:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _flock(file, how)


class MountRefused(Exception):
    """Mounting is not permitted; only root may mount."""


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs with `options` such as `size=1m` on `folder`, which is created."""
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(line, capture_output=True).returncode != 0:
        raise MountRefused
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Raises `subprocess.CalledProcessError` for `ro` while a file is open for writing."""
    line = ["mount", "-o", f"remount,{options}", str(folder)]
    subprocess.run(line, check=True, capture_output=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Fill the disk to its last byte."""
    filler = folder / "filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        yield
    finally:
        filler.unlink(missing_ok=True)
