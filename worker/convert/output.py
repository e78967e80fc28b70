"""The GGUF being written; it gets its name only after verification.

Everything goes to a file in a temporary folder beside it, and is renamed after it was read back and
verified. The first four bytes are zero until all tensors are written, so no loader takes the file
of a killed conversion for a model. The next conversion into the same place removes it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from worker.convert.family.rules import Metadata, Typed, Value
from worker.convert.tensor_plan import OutputTensor
from worker.errors import ModelError, of_file
from worker.models.gguf.tensors import padded
from worker.models.scratch import Scratch

_MAGIC = b"GGUF"
_HEAD_BYTES = 1 << 20
"""How far `patch` searches for its placeholder: well beyond the start of the vocabulary."""


class OutputFile:
    """A context manager: `commit` gives the file its name; without it, the exit removes the
    file."""

    def __init__(self, path: Path, *, overwrite: bool = True) -> None:
        """With `overwrite`, `commit` may replace an existing file."""
        self.path = path
        self._overwrite = overwrite

    def __enter__(self) -> OutputFile:
        with ExitStack() as opened:
            try:
                folder = opened.enter_context(Scratch(self.path.parent))
                self.partial = folder / "model.partial"  # `NAME` may have no room for a suffix.
                self._file = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise ModelError(f"{self.path} cannot be written: {error.strerror}") from None
            opened.callback(os.close, self._file)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def write_header(
        self,
        architecture: str,
        metadata: Metadata,
        tensors: Sequence[OutputTensor],
    ) -> list[OutputTensor]:
        """Returns the tensors with their offsets."""
        with of_file(self.path):
            placed = write_layout(self.partial, architecture, metadata, tensors)
        os.pwrite(self._file, bytes(len(_MAGIC)), 0)
        return placed

    def write(self, data: npt.NDArray[np.uint8], position: int) -> None:
        """Write one chunk's bytes. Thread-safe: chunks do not overlap."""
        view = data.data
        with of_file(self.path):
            while len(view):
                count = os.pwrite(self._file, view, position)
                view, position = view[count:], position + count

    def patch(self, placeholder: str, text: str) -> None:
        """Replace a placeholder in the header by a text of the same length."""
        old, new = placeholder.encode(), text.encode()
        assert len(old) == len(new)
        head = os.pread(self._file, _HEAD_BYTES, 0)
        position = head.find(old)
        assert position > 0 and head.count(old) == 1
        os.pwrite(self._file, new, position)

    def seal(self) -> None:
        """Write the magic bytes that make the file a GGUF; its name stays the partial one."""
        with of_file(self.path):
            os.pwrite(self._file, _MAGIC, 0)
            os.fsync(self._file)
        if hasattr(os, "posix_fadvise"):  # Verification then reads the disk, not the cache.
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        with of_file(self.path):
            os.fsync(self._file)
        if not self._overwrite and os.path.lexists(self.path):
            raise ModelError(
                f"{self.path} appeared during the conversion and is kept; --overwrite replaces it"
            )
        os.replace(self.partial, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            with of_file(self.path.parent):
                os.fsync(folder)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without fsync of folders (VirtualBox)
                raise
        finally:
            os.close(folder)


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise `ModelError` if the folder's disk lacks the bytes that `what` needs."""
    if (available := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"{folder} has {available:,} bytes free, {what} needs {needed:,}; free some, or use "
            "another folder",
            needed_bytes=needed,
            available_bytes=available,
        )


def write_layout(
    path: Path,
    architecture: str,
    metadata: Metadata,
    tensors: Sequence[OutputTensor] = (),
) -> list[OutputTensor]:
    """Write a GGUF of the right length whose tensors are holes; returns them with their offsets."""
    # The package logs every tensor.
    logging.getLogger("gguf").setLevel(logging.ERROR)
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in metadata.items():
        _add(writer, key.format(arch=architecture), value)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),
            tensor.size_bytes,
            raw_dtype=gguf.GGMLQuantizationType[tensor.kind],
        )
    with closing(writer):
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    placed, position = [], padded(path.stat().st_size, gguf.GGUF_DEFAULT_ALIGNMENT)
    for tensor in tensors:
        placed.append(replace(tensor, offset=position))
        position = padded(position + tensor.size_bytes, gguf.GGUF_DEFAULT_ALIGNMENT)
    if tensors:
        os.truncate(path, position)
    return placed


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, Typed):
        kinds = gguf.GGUFValueType.__members__
        sub_type = kinds.get(value.item_kind.upper())
        writer.add_key_value(key, value.value, kinds[value.kind.upper()], sub_type)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif len(value):
        writer.add_array(key, value)
