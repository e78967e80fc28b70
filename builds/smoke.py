"""`python -m builds smoke WHEEL`: checks that the wheel works in an otherwise fresh venv.

The venv gets the wheel and the worker. A child process in it loads every plug-in, lists the devices
and decodes one token. Without a given model, the bundled one is converted first.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from builds import environment, store
from builds.errors import BuildError
from builds.pins import FOLDER

CHILD = FOLDER / "smoke_child.py"
BUNDLED = FOLDER.parent / "worker" / "assets" / "tiny-model"
LIMIT_S = 600


def smoke(wheel: Path, model: Path | None = None) -> dict[str, Any]:
    """The child's report; raises BuildError if it decoded no token."""
    for wanted in filter(None, (wheel, model)):
        if not wanted.exists():
            raise BuildError(f"{wanted}: there is no such file.")
    with tempfile.TemporaryDirectory(prefix="llorch-smoke-") as scratch:
        python = environment.install(Path(scratch, "venv"), [wheel])
        if model is None:
            model = Path(scratch, "bundled.gguf")
            convert_bundled(python, model)
        return run_child(python, model)


def run_child(python: Path, model: Path, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the child with a Python that has the wheel; `prefix` wraps it (qemu)."""
    command = [*prefix, str(python), "-I", str(CHILD), str(model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if result.returncode != 0:
        signal = f" (signal {-result.returncode})" if result.returncode < 0 else ""
        raise BuildError(
            f"The wheel failed with exit code {result.returncode}{signal}:\n{result.stderr[-2000:]}"
        )
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def convert_bundled(python: Path, target: Path) -> None:
    store.say("converting the bundled model")
    command = [str(python), "-m", "worker.commands.convert", str(BUNDLED), str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if result.returncode != 0:
        raise BuildError(f"The bundled model could not be converted:\n{result.stderr[-2000:]}")
