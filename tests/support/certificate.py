"""A self-signed certificate."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def own_certificate(folder: Path, key: tuple[str, ...] = ("rsa:2048",)) -> Path:
    """Write a new key and certificate for 127.0.0.1 into one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    path = folder / "own.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", *key, "-nodes", "-days", "2"]
        + ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        + ["-keyout", str(folder / "key"), "-out", str(path)],
        check=True,
        capture_output=True,
    )
    path.write_text(path.read_text() + (folder / "key").read_text())
    return path
