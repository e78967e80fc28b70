"""The bundled model as a GGUF, converted by the real command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gguf

import worker
from tests.support.gguf_file import finish
from tests.support.made import made_once

ASSET = Path(next(iter(worker.__path__))) / "assets" / "tiny-model"


@made_once("tiny-{outtype}.gguf")
def bundled_gguf(target: Path, outtype: str = "f32") -> None:
    command = [sys.executable, "-m", "worker.commands.convert", str(ASSET), str(target)]
    done = subprocess.run(
        [*command, "--outtype", outtype, "--progress", "none"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def bundled_with(
    target: Path, changes: Mapping[str, str | int | None], outtype: str = "q8_0"
) -> Path:
    """Write the bundled model's weights to `target` with changed metadata: a text, an unsigned
    number or nothing for each key."""
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
    """Write it with another chat template, or without one."""
    return bundled_with(target, {"tokenizer.chat_template": template})


def bundled_pooling(target: Path) -> Path:
    """Write it with pooling declared: the same weights for embeddings."""
    return bundled_with(target, {"llama.pooling_type": int(gguf.PoolingType.MEAN)}, "f32")
