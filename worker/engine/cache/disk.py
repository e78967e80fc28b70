"""The third tier: a folder of finished prefixes that outlive the engine, with a limit on its size.

The engine thread calls it; two threads of its own, at a low priority, read and write the files.
Several workers may share a folder; each finds the others' files at its start.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path

from worker.background import background_thread
from worker.devices.plan.cells import LARGEST_SHARE
from worker.engine.cache.disk_file import (
    SUFFIX,
    Damaged,
    Entry,
    read,
    read_entry,
    write,
)
from worker.engine.cache.moves import State
from worker.engine.tokens import common_length
from worker.errors import ConfigError
from worker.llama.memory_kind import MemoryKind
from worker.observability.logs import get_logger
from worker.setting_files import KEY_BYTES, KEY_FILE, UNFINISHED, check_store
from worker.wire.adapters import Scope

log = get_logger()

_OPENING_SECONDS = 1.0
"""How long a start waits for the store; after that, the store opens in the background."""
_ABANDONED_SECONDS = 3600
"""An unfinished file of this age is abandoned."""


Binding = tuple[str, Sequence[str]]
"""A hash of what all states depend on, which must be equal for an engine to read them; and a hash
of each adapter that is loaded."""


class Disk:
    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        kind: MemoryKind,
        bind: Callable[[Path], Binding],
    ) -> None:
        """A thread of the store calls `bind`.

        Raises:
            ConfigError: the folder cannot be used, or other users could put files into it.
        """
        self._folder, self._limit_bytes, self._kind = folder, limit_bytes, kind
        self.largest_bytes = limit_bytes // LARGEST_SHARE
        """The most bytes of a state that is written."""
        self._secret = _open(folder)
        self._adapters: Sequence[str] = ()
        self._key, self._name_prefix = b"", ""
        """The key and the name prefix of this engine's files; empty until its model is hashed."""
        self._entries: dict[Path, Entry] = {}
        self._lock = threading.Lock()
        self._write_trouble = ""
        """Why the last file could not be written; empty if it was."""
        self._reader, self._writer = (
            background_thread(f"kv-store-{name}") for name in ("reader", "writer")
        )
        # If the model was hashed before, this ends at once and the prefixes are known.
        wait([self._writer.submit(self._find_entries, bind)], _OPENING_SECONDS)

    # --- on the engine thread --------------------------------------------------------------

    def longest(self, prompt: Sequence[int], scope: Scope) -> tuple[Entry, int] | None:
        """The entry with the most reusable tokens of a prompt, and their number."""
        if not self._key:
            return None
        tokens, salt = array("i", prompt), self._salted(scope)
        with self._lock:
            entries = [each for each in self._entries.values() if each.salt == salt]
        best: tuple[Entry, int] | None = None
        for entry in entries:
            beyond = best[1] if best is not None else 0
            if (n_usable := self._usable(entry, tokens, beyond)) > beyond:
                best = entry, n_usable
        return best

    def has(self, tokens: Sequence[int], scope: Scope) -> bool:
        """Whether a stored prefix allows all of these tokens to be reused."""
        found = self.longest(tokens, scope)
        return found is not None and found[1] == len(tokens)

    def read(self, entry: Entry, scope: Scope, done: Callable[[State | None], None]) -> None:
        """Read a state of this scope. `done` gets it on the store's thread, or `None` if it cannot
        be used."""
        self._reader.submit(lambda: done(self._read(entry, scope)))

    def write(self, state: State, done: Callable[[], None]) -> None:
        """Write a state. `done` is called in any case, by the store's thread or at once."""
        self._writer.submit(self._write, state).add_done_callback(lambda _: done())

    def _usable(self, entry: Entry, tokens: array[int], beyond: int) -> int:
        """How many of the tokens can be reused; 0 if that cannot be more than `beyond`. Of many
        files, most are ruled out by one comparison."""
        if entry.tokens[: beyond + 1] != tokens[: beyond + 1]:
            return 0
        n_common, cuts = common_length(entry.tokens, tokens), (n for n, _ in entry.snapshots)
        return self._kind.longest_cut(n_common, len(entry.tokens), cuts)

    def _salted(self, scope: Scope) -> str:
        """A scope as it is stored: hashed with a key, because a salt may be a secret."""
        if scope == Scope():
            return ""
        adapters = [(self._adapters[number], scale) for number, scale in scope.adapters]
        content = json.dumps([scope.salt, adapters]).encode()
        return hmac.digest(self._secret, content, "sha256").hex()

    # --- on the store's threads ------------------------------------------------------------

    def _find_entries(self, bind: Callable[[Path], Binding]) -> None:
        try:
            binding, self._adapters = bind(self._folder)
            self._key = hmac.digest(self._secret, binding.encode(), "sha256")
            self._name_prefix = binding[:16] + "-"
            self._make_room(0)
            for path in self._folder.glob(f"{self._name_prefix}*{SUFFIX}"):
                self._add_entry(path)
        except OSError as error:
            log.warning("kv_store.unusable", reason=str(error))
            return
        sizes = [entry.size_bytes for entry in self._entries.values()]
        log.info("kv_store.opened", prefixes=len(sizes), bytes=sum(sizes))

    def _add_entry(self, path: Path) -> None:
        try:
            entry = read_entry(path)
        except (Damaged, OSError) as fault:
            self._ignore(path, fault)
            return
        with self._lock:
            self._entries[path] = entry

    def _read(self, entry: Entry, scope: Scope) -> State | None:
        try:
            state = read(entry, scope, self._key)
            os.utime(entry.path)
        except (Damaged, OSError, MemoryError) as fault:
            self._ignore(entry.path, fault)
            return None
        return state

    def _write(self, state: State) -> None:
        if not self._key:
            return  # the reason was logged
        salt = self._salted(state.scope)
        path = self._folder / f"{self._name_prefix}{secrets.token_hex(8)}{SUFFIX}"
        try:
            entry = write(path, state, salt, self._key, self._make_room)
        except OSError as error:
            why = error.strerror or str(error)
            if why != self._write_trouble:  # not once a request while a disk is full
                log.warning("kv_store.write_failed", folder=str(self._folder), reason=why)
            self._write_trouble = why
            return
        self._write_trouble = ""
        with self._lock:
            others = [each for each in self._entries.values() if each.salt == salt]
            self._entries[path] = entry
        for each in others:
            n_all = len(each.tokens)
            if self._usable(entry, each.tokens, n_all - 1) == n_all:  # it makes this superfluous
                self._remove(each.path)

    def _make_room(self, n_bytes: int) -> None:
        """Remove the least recently used files, whichever worker wrote them. A time in the future,
        which comes from a wrong clock, counts as equally far in the past."""
        files, total, now = list[tuple[float, int, str]](), n_bytes, time.time()
        with os.scandir(self._folder) as found:  # of ten thousand files, making paths takes longest
            for file in found:
                if file.name.endswith((SUFFIX, UNFINISHED)):
                    with contextlib.suppress(OSError):
                        status = file.stat()
                        age = abs(now - status.st_mtime)
                        if age > _ABANDONED_SECONDS and file.name.endswith(UNFINISHED):
                            os.unlink(file)
                            continue
                        total += status.st_size
                        files.append((age, status.st_size, file.name))
        if total <= self._limit_bytes:
            return
        for _, size, name in sorted(files, reverse=True):
            if total <= self._limit_bytes:
                return
            if name.endswith(SUFFIX):  # others may be being written
                self._remove(self._folder / name)
                total -= size

    def _ignore(self, path: Path, fault: Exception) -> None:
        """Log why a file cannot be used, and remove it if it is damaged. It is normal for a file to
        be gone: another worker has evicted it."""
        level = "debug" if isinstance(fault, FileNotFoundError) else "warning"
        getattr(log, level)("kv_store.ignored", file=path.name, reason=str(fault))
        if isinstance(fault, Damaged):
            self._remove(path)
        else:
            with self._lock:
                self._entries.pop(path, None)

    def _remove(self, path: Path) -> None:
        with self._lock:
            self._entries.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()


def _open(folder: Path) -> bytes:
    """Create the folder if needed, and check it; returns its secret."""
    try:
        check_store(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _secret(folder / KEY_FILE)
    except OSError as error:
        why = f"--kv-store {folder} cannot be used: {error.strerror}."
        raise ConfigError(why, field="kv_store") from None


def _secret(path: Path) -> bytes:
    """The folder's secret; made once. Workers that start at the same time agree on one, because a
    link to the complete file appears atomically."""
    if not path.exists():
        made = path.with_name(f"key-{secrets.token_hex(8)}{UNFINISHED}")
        descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            made.unlink()
    return path.read_bytes()
