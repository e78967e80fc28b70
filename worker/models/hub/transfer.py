"""Transfers files from the hub to the disk: resumed, verified, then visible.

Blocking; runs in the download's thread. `hf_hub_download` does the transfer, by Xet if the hub
offers it, except for two things:

- It does not resume (`test_the_library_itself_does_not_resume`). A large file over plain HTTP is
  therefore written to `blobs/<etag>.incomplete`, and a later start continues it. A file in Xet
  starts from the beginning; `HF_HUB_DISABLE_XET=1` makes all files come over HTTP.
- It checks a file's length, not its content. Every file is therefore hashed before it is used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, tqdm  # type: ignore[attr-defined]

from worker.errors import DownloadError, of_lock
from worker.models.hub.cache import RepoCache, content_matches
from worker.models.hub.remote import LIBRARY, RemoteFile, Stopped, translated_errors
from worker.models.stored import status_of
from worker.wire.messages import OnProgress, Progress

LOCK_POLL_SECONDS = 0.2
REPORT_INTERVAL_SECONDS = 0.2
DISK_RESERVE_BYTES = 64 * 2**20
RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, slots=True)
class Transfer:
    cache: RepoCache
    on_progress: OnProgress
    stop: threading.Event
    """Set when the worker stops."""

    def fetch_all(self, files: Sequence[RemoteFile]) -> None:
        """Download the files that are not in the cache yet."""
        missing = [
            file for file in files if not self.cache.find(file.commit, file.name, file.sha256)
        ]
        for file in missing:
            # If the hub's own hash contradicts the pin, the download is pointless.
            if file.pin and len(file.etag) == len(file.pin) and file.etag != file.pin:
                raise self._checksum_error(file)
        self._check_disk(missing)
        total_bytes = sum(file.size_bytes or 0 for file in missing)
        counter = _Counter(self, total_bytes)
        for file in missing:
            counter.file = file
            self._fetch(file, counter)
            counter.finish(file)

    def _fetch(self, file: RemoteFile, counter: _Counter) -> None:
        locks = self.cache.hub_dir / ".locks" / self.cache.folder
        locks.mkdir(parents=True, exist_ok=True)
        with self._locked(locks / f"{file.etag}.resume.lock"):
            # Another worker may have fetched it meanwhile, and `_fetch_alone` would delete it.
            if not self.cache.find(file.commit, file.name, file.sha256):
                self._fetch_alone(file, counter)

    def _fetch_alone(self, file: RemoteFile, counter: _Counter) -> None:
        path = self.cache.snapshot(file.commit) / file.name
        if path.exists():
            self.cache.discard(path)  # it is damaged, else it would not be fetched
        blob = self.cache.root / "blobs" / file.etag
        if blob.exists() and not content_matches(blob, file.etag, file.pin, self.cache.cache_dir):
            blob.unlink()  # it came with another commit and was damaged since
        # The library writes in chunks of this size, so a smaller file leaves nothing to resume.
        if not _by_xet(file) and (file.size_bytes or 0) > constants.DOWNLOAD_CHUNK_SIZE:
            self._fetch_resumable(file, counter)
        with translated_errors(self.cache.repo, file.name):
            hf_hub_download(
                self.cache.repo,
                file.name,
                revision=file.commit,
                cache_dir=self.cache.hub_dir,
                library_name=LIBRARY,
                tqdm_class=_progress_bar(counter),
            )
        self.on_progress(Progress("verify", counter.percent))
        if not self.cache.is_intact(path, file.sha256):
            self.cache.discard(path)
            raise self._checksum_error(file)

    def _fetch_resumable(self, file: RemoteFile, counter: _Counter) -> None:
        """Download the file's blob; `hf_hub_download` then only links to it."""
        blob = self.cache.root / "blobs" / file.etag
        partial = blob.with_name(f"{blob.name}.incomplete")
        if blob.exists():
            return
        blob.parent.mkdir(parents=True, exist_ok=True)
        # The partial file may not be a prefix of this file: then try once more, from the start.
        for _ in range(2 if status_of(partial)[0] else 1):
            self._append(file, partial, counter)
            if content_matches(partial, file.etag, file.pin):
                os.replace(partial, blob)
                return
            partial.unlink()
        raise self._checksum_error(file)

    def _append(self, file: RemoteFile, partial: Path, counter: _Counter) -> None:
        """Download the rest of the file to the end of `partial`."""
        with translated_errors(self.cache.repo, file.name), partial.open("ab") as out:
            if out.tell() > (file.size_bytes or 0):
                out.seek(0)
                out.truncate()
            resumed_bytes = out.tell()
            try:
                http_get(
                    hf_hub_url(self.cache.repo, file.name, revision=file.commit),
                    out,
                    resume_size=resumed_bytes,
                    headers=build_hf_headers(library_name=LIBRARY),
                    expected_size=file.size_bytes,
                    displayed_filename=file.name,
                    tqdm_class=_progress_bar(counter),
                )
            except HfHubHTTPError as error:
                # The storage's file is not longer than the partial one, which the hash then judges.
                if not resumed_bytes or error.response.status_code != RANGE_NOT_SATISFIABLE:
                    raise
            out.flush()
            os.fsync(out.fileno())
        self.on_progress(Progress("verify", counter.percent))

    def _check_disk(self, files: Sequence[RemoteFile]) -> None:
        blobs = self.cache.root / "blobs"
        needed = sum(
            max(0, (file.size_bytes or 0) - status_of(blobs / f"{file.etag}.incomplete")[0])
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
        """Hold a file's lock against other processes; raises `Stopped` if the worker stops."""
        lock = FileLock(path, thread_local=False)
        while not lock.is_locked:
            if self.stop.is_set():
                raise Stopped
            try:
                with of_lock():
                    lock.acquire(timeout=LOCK_POLL_SECONDS)
            except Timeout:
                self.on_progress(Progress("waiting for another worker's download", 0.0))
        try:
            yield
        finally:
            lock.release()

    def _checksum_error(self, file: RemoteFile) -> DownloadError:
        expected = file.pin or file.etag
        return DownloadError(
            f"{file.name!r} of {self.cache.repo!r} does not have the expected hash {expected}; "
            "the file was changed, or damaged on its way.",
            reason="checksum",
            repo=self.cache.repo,
            expected=expected,
        )


@dataclass(slots=True)
class _Counter:
    """Counts the bytes of all files of a download, and reports them a few times a second.

    It aborts a transfer of more bytes than the hub announced, before they are stored.
    """

    transfer: Transfer
    total_bytes: int
    file: RemoteFile | None = None
    finished_bytes: int = 0
    file_bytes: int = 0
    fresh_bytes: int = 0
    started: float = field(default_factory=time.monotonic)
    reported: float = 0.0

    @property
    def percent(self) -> float:
        done = self.finished_bytes + self.file_bytes
        return round(min(100.0, 100 * done / self.total_bytes), 1) if self.total_bytes else 0.0

    def add(self, n_bytes: int) -> None:
        """Count bytes of a transfer; raises to abort it if it is too long or the worker stops."""
        if self.transfer.stop.is_set():
            raise Stopped
        self.file_bytes += n_bytes
        self.fresh_bytes += n_bytes
        file = self.file
        if file and file.size_bytes and self.file_bytes > file.size_bytes and not _by_xet(file):
            repo = self.transfer.cache.repo
            raise DownloadError(
                f"{file.name!r} of {repo!r} is longer than the {file.size_bytes} bytes that "
                "the hub announced; the file was changed, or damaged on its way.",
                reason="checksum",
                repo=repo,
            )
        now = time.monotonic()
        if now - self.reported >= REPORT_INTERVAL_SECONDS:
            self.reported = now
            rate = self.fresh_bytes / max(now - self.started, 1e-3)
            self.report(round(rate, 1))

    def finish(self, file: RemoteFile) -> None:
        self.finished_bytes += file.size_bytes or self.file_bytes
        self.file_bytes = 0
        self.report()

    def report(self, rate: float | None = None) -> None:
        total_bytes = self.total_bytes or None
        self.transfer.on_progress(Progress("download", self.percent, rate, total_bytes))


def _progress_bar(counter: _Counter) -> Any:
    """The class of a progress bar for huggingface_hub that shows nothing and feeds `counter`.

    A file from Xet has two bars: bytes on the network and bytes of the file. Only the latter count.
    """

    class CountingBar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            self.counts = not (name or "").endswith(".transfer")
            if self.counts:
                counter.file_bytes = int(kwargs.get("initial") or 0)
                counter.report()
            kwargs["disable"] = True
            super().__init__(*args, name=name, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self.counts:
                counter.add(int(n or 0))

    return CountingBar


def _by_xet(file: RemoteFile) -> bool:
    return file.in_xet and not constants.HF_HUB_DISABLE_XET
