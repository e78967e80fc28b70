"""Environments of packages from PyPI that are not installed in the worker's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def python_with(requirements: Path, venv: Path) -> Path:
    """Return the interpreter of `venv` with these requirements; recreated when they change."""
    python, stamp = venv / "bin" / "python", venv / "requirements.txt"
    wanted = requirements.read_text("utf-8")
    if not stamp.exists() or stamp.read_text("utf-8") != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "--requirement", str(requirements)], check=True)
        stamp.write_text(wanted, "utf-8")
    return python
