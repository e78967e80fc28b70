"""The bundled model as a GGUF, converted by the real command."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf

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


def bundled_pooling(target: Path, kind: str = "mean") -> Path:
    """The bundled model in `target` with pooling declared: the same weights, another use."""
    source = gguf.GGUFReader(bundled_gguf("f32"))
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of, *inner = field.types
            writer.add_key_value(name, field.contents(), of, inner[0] if inner else None)
    writer.add_pooling_type(gguf.PoolingType[kind.upper()])
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
