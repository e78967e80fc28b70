"""The bundled model as a GGUF, converted by the real command."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import gguf

import worker
from tests.support.gguf_file import finish

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


def bundled_with(
    target: Path, changes: Mapping[str, str | int | None], outtype: str = "q8_0"
) -> Path:
    """The bundled model's weights in `target`, with other metadata: a text, an unsigned number or
    nothing for each key."""
    source = gguf.GGUFReader(bundled_gguf(outtype))
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", *changes}:
            of, *inner = field.types
            writer.add_key_value(name, field.contents(), of, inner[0] if inner else None)
    for name, value in changes.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return target


def bundled_with_template(target: Path, template: str | None) -> Path:
    """With another chat template, or with none."""
    return bundled_with(target, {"tokenizer.chat_template": template})


def bundled_pooling(target: Path) -> Path:
    """With pooling declared: the same weights, another use."""
    return bundled_with(target, {"llama.pooling_type": int(gguf.PoolingType.MEAN)}, "f32")
