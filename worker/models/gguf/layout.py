"""A parser for one GGUF file that limits everything and reads into a small buffer.

Runs in any thread of any process (the start of the API process, the engine's preflight, the
converter's checks). It knows only the container format: magic, counts, key/value pairs, tensor
table, alignment. `header` interprets the keys.

The file is untrusted. Every count, length and offset is checked against the file's size before it
is used, arrays are skipped without building Python objects, and the number of items of each kind is
limited: a hostile file costs neither memory nor minutes. The file is not mapped, because truncating
a mapped file would kill the process. A file that is accepted here passes the checks of llama.cpp's
own reader, which is stricter than the format in one point: tensors must follow each other without
gaps.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from worker.errors import ModelError
from worker.models.gguf.constants import constants
from worker.models.gguf.faults import check_magic, unusable
from worker.models.gguf.tensors import Row, TensorEntry, padded, place_tensors
from worker.setting_files import FileVersion, version_of

Scalar = int | float | bool | str

MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 16 * 2**20
"""Of one string; the longest real ones are chat templates of some 100 kB."""
MAX_STRINGS = 2**23
"""In all arrays of one file; the largest real vocabularies with their merges have 1e6."""
MAX_ARRAY_ITEMS = 2**30
MAX_TENSORS = 131_072
MAX_TENSOR_NAME_BYTES = 63
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 2**20
MAX_BLOCKS = 512
"""llama.cpp's own limit on layers."""

_BUFFER_BYTES = 2**18
_BLOCK_BYTES = 2**20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_TENSOR_TAIL = struct.Struct("<IQ")
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: ("uint8", struct.Struct("<B")),
    1: ("int8", struct.Struct("<b")),
    2: ("uint16", struct.Struct("<H")),
    3: ("int16", struct.Struct("<h")),
    4: ("uint32", struct.Struct("<I")),
    5: ("int32", struct.Struct("<i")),
    6: ("float32", struct.Struct("<f")),
    7: ("bool", struct.Struct("<?")),
    10: ("uint64", struct.Struct("<Q")),
    11: ("int64", struct.Struct("<q")),
    12: ("float64", struct.Struct("<d")),
}


def fits(kind: str, value: Scalar) -> bool:
    """Whether this GGUF type can hold the value unchanged."""
    if isinstance(value, str):
        return kind == "string"
    if isinstance(value, bool):
        return kind == "bool"
    if isinstance(value, float):
        return kind == "float32"  # llama.cpp reads no float64
    if "int" not in kind:
        return False
    form = next(form for name, form in _NUMBERS.values() if name == kind)
    try:
        form.pack(value)
    except struct.error:
        return False
    return True


@dataclass(frozen=True, slots=True)
class GgufArray:
    """The position of an array in the metadata; its items are read only on request."""

    path: Path
    item_type: str
    length: int
    offset: int

    def __str__(self) -> str:
        return f"[{self.length} items]"

    def read(self) -> list[Scalar]:
        """Read all items from the file as it is now."""
        if self.item_type == "string":
            return [raw.decode("utf-8", errors="replace") for raw in self.read_bytes()]
        form = next(form for name, form in _NUMBERS.values() if name == self.item_type)
        with _reader(self.path, self.offset) as reader:
            raw = reader.take(self.length * form.size, "an array")
        return [value for (value,) in form.iter_unpack(raw)]

    def read_bytes(self) -> Iterator[bytes]:
        """The items of an array of strings, undecoded."""
        assert self.item_type == "string"
        with _reader(self.path, self.offset) as reader:
            read, unpack = reader.file.read, _U64.unpack
            for _ in range(self.length):
                head = read(8)
                n_bytes = unpack(head)[0] if len(head) == 8 else reader.size
                if n_bytes > MAX_STRING_BYTES:
                    raise reader.fault(f"one of its strings claims {n_bytes} bytes")
                raw = read(n_bytes)
                if len(raw) < n_bytes:
                    raise reader.cut()
                yield raw


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """One checked file. `{arch}` in the keys of `unsigned` and `largest` is its architecture."""

    path: Path
    version: int
    size_bytes: int
    read_from: tuple[FileVersion, ...] = field(compare=False)
    """The version of the file when it was opened."""
    metadata: dict[str, Scalar]
    """Without arrays."""
    types: dict[str, str]
    """GGUF type of each metadata key, in the file's order."""
    arrays: dict[str, GgufArray]
    tensors: tuple[TensorEntry, ...]

    def text(self, key: str) -> str | None:
        """A string; `None` if absent or empty. Raises `ModelError` if it has another type."""
        kind = self.types.get(key, "string")
        if kind != "string":
            raise unusable(self.path, f"{key} has the type {kind} instead of string")
        return str(self.metadata.get(key, "")) or None

    def unsigned(self, key: str) -> int | None:
        """A non-negative integer; `None` if absent. Raises `ModelError` if it is anything else."""
        key = self._filled_in(key)
        if key not in self.types:
            return None
        value, kind = self.metadata.get(key), self.types[key]
        if kind == "bool" or not isinstance(value, int) or value < 0:
            raise unusable(self.path, f"{key} is not an unsigned integer: its type is {kind}")
        return value

    def largest(self, key: str) -> int | None:
        """As `unsigned`, or the largest if the file has a list with one number per layer."""
        key = self._filled_in(key)
        array = self.arrays.get(key)
        if array is None:
            return self.unsigned(key)
        if "int" not in array.item_type or not 0 < array.length <= MAX_BLOCKS:
            raise unusable(self.path, f"{key} is not a list of one integer per layer")
        return max(int(value) for value in array.read())

    def _filled_in(self, key: str) -> str:
        # Not `format`: a hostile name may have braces, and a key may be filled in twice.
        architecture = self.metadata.get(constants().Keys.General.ARCHITECTURE)
        return key.replace("{arch}", str(architecture))


def read_layout(path: Path) -> GgufLayout:
    """Parse one GGUF file; raises `ModelError` naming the first fault."""
    with _reader(path) as reader:
        check_magic(path, reader.file.read(24), reader.size)
        reader.file.seek(0)
        return reader.layout()


@contextmanager
def _reader(path: Path, position: int = 0) -> Iterator[_Reader]:
    """Open a reader at a position of the file; raises `ModelError` if it cannot be read."""
    try:
        with open(path, "rb", _BUFFER_BYTES, opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise unusable(path, "it is not a file but a device or a pipe")
            file.seek(position)
            yield _Reader(path, file, status.st_size, position)
    except FileNotFoundError:
        raise ModelError(f"The file {str(path)!r} does not exist.", path=str(path)) from None
    except IsADirectoryError:
        raise ModelError(
            f"{str(path)!r} is a folder instead of a .gguf file.", path=str(path)
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        text = f"The file {str(path)!r} cannot be read: {reason}."
        raise ModelError(text, path=str(path)) from error


def _open_at_once(path: str, flags: int) -> int:
    """Open without blocking: a plain `open` of a named pipe without a writer would never return."""
    return os.open(path, flags | os.O_NONBLOCK)


class _Reader:
    """Reads forward from a position, which never leaves the file."""

    def __init__(self, path: Path, file: IO[bytes], size: int, position: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.opened = version_of(file.fileno())
        self.position = position
        self.strings_left = MAX_STRINGS

    # --- primitives ----------------------------------------------------------------------

    def fault(self, what: str) -> ModelError:
        return unusable(self.path, what)

    def cut(self) -> ModelError:
        return self.fault("it became shorter while it was read")

    def need(self, n_bytes: int, what: str) -> None:
        """Check that the next bytes exist, before memory is allocated for them."""
        if n_bytes > self.size - self.position:
            raise self.fault(
                f"{what} needs {n_bytes} bytes at offset {self.position}, "
                f"but the file ends after {self.size} bytes"
            )

    def take(self, n_bytes: int, what: str) -> bytes:
        self.need(n_bytes, what)
        taken = self.file.read(n_bytes)
        if len(taken) < n_bytes:
            raise self.cut()
        self.position += n_bytes
        return taken

    def skip(self, n_bytes: int, what: str) -> None:
        self.need(n_bytes, what)
        self.file.seek(n_bytes, os.SEEK_CUR)
        self.position += n_bytes

    def number(self, form: struct.Struct, what: str) -> Any:
        (value,) = form.unpack(self.take(form.size, what))
        return value

    def string(self, what: str) -> str:
        """A string value; bytes that are not UTF-8 are replaced."""
        length = self.number(_U64, f"the length of {what}")
        if length > MAX_STRING_BYTES:
            raise self.fault(
                f"{what} claims {length} bytes, more than the allowed {MAX_STRING_BYTES}"
            )
        return self.take(length, what).decode("utf-8", errors="replace")

    def name(self, what: str, limit: int) -> str:
        """The name of a key or tensor. It must be UTF-8: replaced bytes could make names equal."""
        length = self.number(_U64, f"the length of {what}")
        if not 0 < length <= limit:
            raise self.fault(f"{what} is {length} bytes long instead of 1 to {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8 text") from None

    # --- the parts of the file, in their order -----------------------------------------------

    def layout(self) -> GgufLayout:
        self.skip(4, "the magic")
        version = self.number(_U32, "the version")
        if version & 0xFFFF == 0:
            raise self.fault("it is big-endian; the worker reads little-endian files")
        if version not in (2, 3):
            raise self.fault(f"it has GGUF version {version} instead of 2 or 3")
        n_tensors = self.number(_U64, "the number of tensors")
        n_keys = self.number(_U64, "the number of keys")
        self.check_count("tensors", n_tensors, MAX_TENSORS, 24)
        self.check_count("metadata keys", n_keys, MAX_KEYS, 13)

        values, types, arrays = self.metadata(n_keys)
        key = constants().Keys.General.ALIGNMENT
        alignment = values.get(key, constants().GGUF_DEFAULT_ALIGNMENT)
        if types.get(key, "uint32") != "uint32" or not isinstance(alignment, int):
            raise self.fault(f"{key} is not a uint32")
        if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fault(f"{key} is {alignment}, which is not a power of two")

        rows = list(self.tensor_rows(n_tensors))
        data_offset = padded(self.position, alignment) if rows else self.position
        return GgufLayout(
            path=self.path,
            version=version,
            size_bytes=self.size,
            read_from=(self.opened,),
            metadata=values,
            types=types,
            arrays=arrays,
            tensors=place_tensors(
                self.path, rows, data_offset=data_offset, alignment=alignment, size=self.size
            ),
        )

    def check_count(self, what: str, count: int, limit: int, least_bytes_each: int) -> None:
        fitting = self.size // least_bytes_each
        if count > min(limit, fitting):
            raise self.fault(
                f"it claims {count} {what}, more than the "
                + (f"{fitting} that its size allows" if fitting < limit else f"allowed {limit}")
            )

    def metadata(
        self, n_keys: int
    ) -> tuple[dict[str, Scalar], dict[str, str], dict[str, GgufArray]]:
        values: dict[str, Scalar] = {}
        types: dict[str, str] = {}
        arrays: dict[str, GgufArray] = {}
        for index in range(n_keys):
            key = self.name(f"metadata key {index}", MAX_KEY_BYTES)
            if key in types:
                raise self.fault(f"the metadata key {key!r} occurs twice")
            kind = self.number(_U32, f"the type of {key!r}")
            if kind == _ARRAY:
                types[key] = "array"
                arrays[key] = self.array(key)
            elif kind == _STRING:
                types[key] = "string"
                values[key] = self.string(f"the value of {key!r}")
            elif kind in _NUMBERS:
                types[key], form = _NUMBERS[kind]
                values[key] = self.number(form, f"the value of {key!r}")
            else:
                raise self.fault(f"the metadata key {key!r} has the unknown type {kind}")
        return values, types, arrays

    def array(self, key: str) -> GgufArray:
        kind = self.number(_U32, f"the item type of {key!r}")
        length = self.number(_U64, f"the length of {key!r}")
        if kind not in _NUMBERS and kind != _STRING:
            raise self.fault(f"the array {key!r} has items of the unknown type {kind}")
        if length > MAX_ARRAY_ITEMS:
            raise self.fault(f"the array {key!r} claims {length} items")
        start = self.position
        if kind == _STRING:
            self.skip_strings(key, length)
            return GgufArray(self.path, "string", length, start)
        item_type, form = _NUMBERS[kind]
        self.skip(length * form.size, f"the array {key!r}")
        return GgufArray(self.path, item_type, length, start)

    def skip_strings(self, key: str, length: int) -> None:
        if length > self.strings_left or length > (self.size - self.position) // 8:
            raise self.fault(f"the array {key!r} claims {length} strings, more than fit in it")
        self.strings_left -= length
        while length:
            n_skipped, end = _whole_strings(self.file.read(_BLOCK_BYTES), length)
            length -= n_skipped
            self.position += end
            if not n_skipped or self.position > self.size:
                raise self.fault(
                    f"the strings of {key!r} run past the end of the file at {self.size} bytes"
                )
            self.file.seek(self.position)

    def tensor_rows(self, n_tensors: int) -> Iterator[Row]:
        for index in range(n_tensors):
            name = self.name(f"the name of tensor {index}", MAX_TENSOR_NAME_BYTES)
            n_dims = self.number(_U32, f"the number of dimensions of {name!r}")
            if n_dims > MAX_DIMENSIONS:
                raise self.fault(f"tensor {name!r} has {n_dims} dimensions, more than 4")
            raw = self.take(8 * n_dims, f"the shape of {name!r}")
            tail = self.take(_TENSOR_TAIL.size, f"the table entry of {name!r}")
            kind, offset = _TENSOR_TAIL.unpack(tail)
            yield name, struct.unpack(f"<{n_dims}Q", raw), kind, offset


def _whole_strings(block: bytes, most: int) -> tuple[int, int]:
    """The number of strings, at most `most`, whose length is in the block, and the end of the last,
    which may lie after the block."""
    unpack, end = _U64.unpack_from, 0
    for n_strings in range(most):
        try:
            end += 8 + unpack(block, end)[0]
        except (struct.error, OverflowError):
            return n_strings, end
    return most, end
