"""The bundled model as a GGUF, converted by the real command."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import worker

ASSET = Path(next(iter(worker.__path__))) / "assets" / "tiny-model"


@functools.cache
def bundled_gguf(outtype: str = "f32") -> Path:
    """Converted once a session, into a folder that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="llorch-bundled-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / f"tiny-{outtype}.gguf"
    command = [sys.executable, "-m", "worker.commands.convert", str(ASSET), str(target)]
    done = subprocess.run(
        [*command, "--outtype", outtype, "--progress", "none"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


def bundled_with_template(target: Path, template: str | None) -> Path:
    """The bundled model's weights in `target`, with another chat template or with none."""
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"]
    if template is None:
        command += ["--remove-metadata", "tokenizer.chat_template"]
    else:
        command += ["--chat-template", template]
    done = subprocess.run(
        [*command, str(bundled_gguf("q8_0")), str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target
