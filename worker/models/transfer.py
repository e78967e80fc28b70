"""Bytes from the hub onto this disk: each file under its lock, resumed, verified, then in place.

Blocking; runs in the download's thread. A file becomes visible under its name only after its size
and hash are right; until then it grows in `partial/`, from where the next attempt goes on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from worker.errors import DownloadError
from worker.messages import Progress
from worker.models import hub
from worker.models.checksum import remember_sha256
from worker.models.hub import RemoteFile, Stopped
from worker.models.hub_cache import FileRecord, RepoCache, content_matches

OnProgress = Callable[[Progress], None]

LOCK_POLL_SECONDS = 0.2
REPORT_INTERVAL_SECONDS = 0.2
DISK_RESERVE_BYTES = 64 * 2**20


class Transfer:
    """Brings files of one repository into its cache."""

    def __init__(self, cache: RepoCache, report: OnProgress, stop: threading.Event) -> None:
        self.cache = cache
        self.report = report
        self.stop = stop

    def fetch_all(self, files: Sequence[RemoteFile], pins: dict[str, str]) -> None:
        """Download the files that are not here yet; `pins` are SHA-256 they must have."""
        missing = [
            file
            for file in files
            if self.cache.find(file.commit, file.name, pins.get(file.name)) is None
        ]
        for file in missing:
            pin = pins.get(file.name)
            # A pin that the hub's own hash already contradicts saves the whole download.
            if pin and len(file.etag) == len(pin) and file.etag != pin:
                raise self._checksum_error(file, pin, file.etag)
        self._check_disk(missing)
        counter = _Counter(sum(file.size_bytes or 0 for file in missing), self.report, self.stop)
        for number, file in enumerate(missing, start=1):
            label = file.name if len(missing) == 1 else f"{number}/{len(missing)} {file.name}"
            partial = self.cache.partial(file.etag)
            partial.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(partial.with_name(f"{partial.name}.lock")):
                if self.cache.find(file.commit, file.name, pins.get(file.name)) is None:
                    self._fetch(file, pins.get(file.name), counter, label)
            counter.finish(file)

    def _fetch(self, file: RemoteFile, pin: str | None, counter: _Counter, label: str) -> None:
        partial = self.cache.partial(file.etag)
        resumed = _size_of(partial) > 0
        matches, actual = self._receive(file, partial, counter, label)
        if resumed and not matches:
            # What lay there was not the beginning of this file: once more, from the start.
            partial.unlink()
            matches, actual = self._receive(file, partial, counter, label)
        if not matches or pin not in (None, actual):
            partial.unlink()
            raise self._checksum_error(file, pin or file.etag, actual)
        target = self.cache.path(file.commit, file.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        size_bytes = partial.stat().st_size
        os.replace(partial, target)
        remember_sha256(target, actual, self.cache.cache_dir)
        record = FileRecord(size_bytes, actual, file.etag)
        self.cache.store_record(file.commit, file.name, record)

    def _receive(
        self, file: RemoteFile, partial: Path, counter: _Counter, label: str
    ) -> tuple[bool, str]:
        hub.fetch(self.cache.repo, file, partial, counter, label)
        self.report(Progress("verify", counter.percent))
        return content_matches(partial, file.etag)

    def _check_disk(self, files: Sequence[RemoteFile]) -> None:
        needed = sum(
            max(0, (file.size_bytes or 0) - _size_of(self.cache.partial(file.etag)))
            for file in files
        )
        self.cache.root.mkdir(parents=True, exist_ok=True)
        available = shutil.disk_usage(self.cache.root).free
        if needed and needed + DISK_RESERVE_BYTES > available:
            raise DownloadError(
                f"The disk of {str(self.cache.root)!r} has {available} bytes free, the download "
                f"of {self.cache.repo!r} needs {needed}; free some or choose another --cache-dir.",
                reason="disk_full",
                needed_bytes=needed,
                available_bytes=available,
                repo=self.cache.repo,
            )

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """One download of a file at a time, across processes; gives up when we are stopped."""
        lock = FileLock(path, thread_local=False)
        while True:
            if self.stop.is_set():
                raise Stopped
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=LOCK_POLL_SECONDS)
                break
        try:
            yield
        finally:
            lock.release()

    def _checksum_error(self, file: RemoteFile, expected: str, actual: str) -> DownloadError:
        return DownloadError(
            f"{file.name!r} of {self.cache.repo!r} is not what was expected: its hash is {actual}, "
            f"not {expected}; the file was changed, or damaged on its way.",
            reason="checksum",
            repo=self.cache.repo,
            expected=expected,
            actual=actual,
        )


class _Counter:
    """Bytes over all files of a download, told at most a few times a second."""

    def __init__(self, total_bytes: int, report: OnProgress, stop: threading.Event) -> None:
        self.total_bytes = total_bytes
        self.report = report
        self.stop = stop
        self.finished_bytes = 0
        self.file_bytes = 0
        self.fresh_bytes = 0
        self.started = time.monotonic()
        self.reported = 0.0

    @property
    def percent(self) -> float:
        done = self.finished_bytes + self.file_bytes
        return round(min(100.0, 100 * done / self.total_bytes), 1) if self.total_bytes else 0.0

    def begin(self, n_bytes_here: int) -> None:
        """A file's transfer starts, with this much of it here already."""
        self.file_bytes = n_bytes_here
        self.add(0)

    def add(self, n_bytes: int) -> None:
        """Called by the transfer; ends it from inside when the worker stops."""
        if self.stop.is_set():
            raise Stopped
        self.file_bytes += n_bytes
        self.fresh_bytes += n_bytes
        now = time.monotonic()
        if now - self.reported >= REPORT_INTERVAL_SECONDS:
            self.reported = now
            rate = self.fresh_bytes / max(now - self.started, 1e-3)
            self.report(Progress("download", self.percent, round(rate, 1)))

    def finish(self, file: RemoteFile) -> None:
        self.finished_bytes += file.size_bytes or self.file_bytes
        self.file_bytes = 0
        self.report(Progress("download", self.percent))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
