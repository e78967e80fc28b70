"""Writes and reads the file of one state, which is verified before it is used.

The file has a magic, the length of a header in MessagePack, the header, the state of all memory,
the snapshots, and an HMAC-SHA256 of all that. Native code trusts the state, so the key is derived
from a secret of the folder: a file that was not written with it is not used. Blocking; runs on the
disk's threads.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated

import msgspec

from worker.engine.cache.moves import Snapshot, State
from worker.setting_files import UNFINISHED
from worker.wire.adapters import Scope

SUFFIX = ".kv"
_MAGIC = b"LLORCHKV"
_LENGTH_BYTES, _MAC_BYTES = 4, 32
_PIECE = 8 << 20
"""Bytes that are written, read or hashed at once, without the GIL."""
_FIRST = 64
"""The first bytes of a state, which are copied before it is written: the engine thread may restore
it meanwhile, which writes into them."""


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Header(msgspec.Struct, frozen=True):
    salt: str
    tokens: bytes
    """32-bit integers in this machine's byte order; engines with another never read the file."""
    state_bytes: _Count
    snapshots: tuple[tuple[_Count, _Count], ...]
    """The number of tokens and the number of bytes of each."""


class Damaged(Exception):
    """The file is not what this worker wrote; `str` is a clause that says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The content of a file's first part, not verified until the whole file has been read."""

    path: Path
    size_bytes: int
    salt: str
    tokens: array[int]
    state_bytes: int
    snapshots: tuple[tuple[int, int], ...]


def write(
    path: Path,
    state: State,
    salt: str,
    key: bytes,
    make_room: Callable[[int], None] = lambda n_bytes: None,
) -> Entry:
    """Write a state to `path`, completely or not at all. `make_room` is called with its size first.
    The state must be locked, but its snapshots may be evicted meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    tokens, data, snapshots = array("i", state.tokens), state.data, state.snapshots
    assert data is not None, "it was copied"
    sizes = tuple((each.length, len(each.data)) for each in snapshots)
    header = msgspec.msgpack.encode(_Header(salt, tokens.tobytes(), len(data), sizes))
    head = _MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header
    parts = [memoryview(head + data[:_FIRST]), data[_FIRST:]]
    parts += (memoryview(each.data) for each in snapshots)
    size = sum(map(len, parts)) + _MAC_BYTES
    make_room(size)
    unfinished = path.with_suffix(UNFINISHED)
    descriptor = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            mac = hmac.new(key, digestmod="sha256")
            for piece in _pieces(parts):
                mac.update(piece)
                file.write(piece)
            file.write(mac.digest())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return Entry(path, size, salt, tokens, len(data), sizes)


def read_entry(path: Path) -> Entry:
    """The file's first part.

    Raises:
        Damaged: the first part does not fit the file.
        OSError: the file cannot be read.
    """
    with _opened(path) as file:
        return _entry(path, os.fstat(file.fileno()).st_size, partial(_read_bytes, file))


def read(entry: Entry, scope: Scope, key: bytes) -> State:
    """The state of an entry of this scope, verified to have been written with the key.

    Raises:
        Damaged: it was not.
        OSError: the file cannot be read.
    """
    with _opened(entry.path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.size_bytes:
            raise Damaged("its size has changed")
        mac = hmac.new(key, digestmod="sha256")
        take = partial(_read_bytes, file, seen=mac.update)
        # Each part has memory of its own, so that evicting a snapshot frees its bytes.
        found = _entry(entry.path, size, take)
        data = take(found.state_bytes)
        snapshots = [Snapshot(length, bytes(take(n))) for length, n in found.snapshots]
        written_mac = _read_bytes(file, _MAC_BYTES)
    if not hmac.compare_digest(mac.digest(), written_mac):
        raise Damaged("its checksum is wrong: it was changed, or written with another key")
    if (found.salt, found.tokens) != (entry.salt, entry.tokens):
        raise Damaged("it has changed since it was found")
    return State(found.tokens.tolist(), scope, len(data), data, snapshots, is_from_disk=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file of this user to which nobody else has access."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise Damaged("it is a link") from error
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("it is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise Damaged("it belongs to another user, or others may touch it")
        yield file


def _entry(path: Path, size: int, take: Callable[[int], memoryview]) -> Entry:
    """Parse what precedes the state; `take` returns the next bytes."""
    start = len(_MAGIC) + _LENGTH_BYTES
    if size < start + _MAC_BYTES:
        raise Damaged("it is too short")
    head = take(start)
    header_bytes = int.from_bytes(head[len(_MAGIC) :], "little")
    if head[: len(_MAGIC)] != _MAGIC or header_bytes > size:
        raise Damaged("it does not begin like a stored prefix")
    try:
        header = msgspec.msgpack.decode(take(header_bytes), type=_Header)
        tokens = array("i", header.tokens)
    except (msgspec.DecodeError, ValueError):
        raise Damaged("its header is damaged") from None
    body = header.state_bytes + sum(n_bytes for _, n_bytes in header.snapshots)
    if start + header_bytes + body + _MAC_BYTES != size:
        raise Damaged("it is cut off, or longer than its header says")
    return Entry(path, size, header.salt, tokens, header.state_bytes, header.snapshots)


def _pieces(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _PIECE):
            yield part[start : start + _PIECE]


def _read_bytes(
    file: BufferedReader, n_bytes: int, seen: Callable[[memoryview], None] = lambda piece: None
) -> memoryview:
    """The next `n_bytes` of the file; `seen` is called with each piece of them."""
    content = memoryview(bytearray(n_bytes))
    for piece in _pieces([content]):
        if file.readinto(piece) < len(piece):
            raise Damaged("it is cut off")
        seen(piece)
    return content
