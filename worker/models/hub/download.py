"""Downloads a hub reference as verified files.

`download` runs on the API process's event loop and works in a daemon thread, so a worker exits at
once when it is stopped. A later start resumes the download.

If all files of a pinned commit are here, no network call is made. A branch or tag is looked up at
each start, and its commit is recorded only when all its files are here. If the hub or its storage
cannot answer (no network, rate limit), or the cache cannot be written, the last complete download
is used, even if the branch has moved since.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from worker.background import in_daemon_thread
from worker.errors import DownloadError, ModelError
from worker.models.checkpoint_files import INDEX, checkpoint_names, no_tokenizer
from worker.models.gguf.header import split_names
from worker.models.hub.cache import RepoCache
from worker.models.hub.quantisation import SHARE, fitting, models_in, named, of_one_model
from worker.models.hub.remote import DISK_FULL, list_files, remote_file
from worker.models.hub.transfer import Transfer
from worker.models.reference import HubReference, is_projector
from worker.observability.logs import get_logger
from worker.wire.messages import OnProgress, Progress

DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class Downloaded:
    """The place of the model: a GGUF (its first part), or a folder of SafeTensors."""

    path: Path
    commit: str
    projector: Path | None = None
    """The GGUF's projector for pictures and sounds, if one was wanted and the repository has it."""


async def download(
    ref: HubReference,
    *,
    cache_dir: Path,
    sha256: str | None,
    on_progress: OnProgress,
    safetensors_only: bool = False,
    room: Callable[[], int] | None = None,
    projector: bool = False,
) -> Downloaded:
    """Download what `ref` names; raises `DownloadError`, or `ModelError` if it names no model.

    With `safetensors_only`, GGUFs are not considered models. Of one model's quantisations, the one
    that suits the bytes returned by `room` is chosen; without `room`, a file must be named. With
    `projector`, a GGUF's smallest projector is downloaded with it.
    """
    loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(on_progress, progress)

    stop = threading.Event()
    transfer = Transfer(RepoCache(cache_dir, ref.repo), report, stop)
    work = _Download(ref, sha256, safetensors_only, room, projector, transfer)
    try:
        return await asyncio.wrap_future(in_daemon_thread(work.run))
    finally:
        stop.set()


@dataclass(frozen=True, slots=True)
class _Download:
    ref: HubReference
    sha256: str | None
    safetensors_only: bool
    room: Callable[[], int] | None
    with_projector: bool
    transfer: Transfer

    @property
    def cache(self) -> RepoCache:
        return self.transfer.cache

    @property
    def revision(self) -> str:
        return self.ref.revision or DEFAULT_REVISION

    def run(self) -> Downloaded:
        """The files of the current commit, else of the last complete download."""
        known = self.in_cache(self.revision) if self.ref.is_pinned else None
        if known is not None:
            return known
        try:
            return self.newest()
        except DownloadError as error:
            if error.details.get("reason") not in ("network", "rate_limited", "offline", "cache"):
                raise
            commit = self.cache.commit_of(self.revision)
            known = self.in_cache(commit) if commit else None
            if known is None:
                raise
            get_logger().warning(
                "model.revision_unchecked",
                repo=self.ref.repo,
                revision=self.revision,
                commit=known.commit,
                reason=error.details.get("reason"),
            )
            return known

    def newest(self) -> Downloaded:
        """The files of the revision's current commit on the hub."""
        try:
            got = self.gguf(self.ref.file) if self.ref.file is not None else self.repository()
        except OSError as error:
            raise DownloadError(
                f"The cache folder {str(self.cache.root)!r} cannot be used: {error.strerror}; "
                "choose another with --cache-dir.",
                reason="disk_full" if error.errno in DISK_FULL else "cache",
                repo=self.ref.repo,
            ) from error
        self.cache.remember_commit(self.revision, got.commit)
        return got

    def in_cache(self, commit: str) -> Downloaded | None:
        """The reference's files at a commit; `None` unless all are here."""
        file, files = self.ref.file, self.cache.files_of(commit) or {}
        if file is None:
            if folder := self.checkpoint(commit):
                return Downloaded(folder, commit)
            try:
                file = self.one_gguf(files)
            except ModelError:  # there is none, or an incomplete checkpoint
                return None
        paths = self.cache.find_all(commit, split_names(file), self.sha256)
        name = self.projector_of(file, files)
        projector = self.cache.find_all(commit, [name], None) if name else [None]
        return Downloaded(paths[0], commit, projector[0]) if paths and projector else None

    def gguf(self, file: str, commit: str | None = None) -> Downloaded:
        """One GGUF, whole or in parts, and its projector."""
        paths, commit = self.fetch(split_names(file), commit or self.revision, self.sha256)
        # Even if no projector is wanted now: a later start may want one, and not ask the hub.
        files = self.cache.files_of(commit) or self.list_files(commit)[1]
        projector = None
        if name := self.projector_of(file, files):
            [projector], _ = self.fetch((name,), commit, None)
        return Downloaded(paths[0], commit, projector)

    def fetch(
        self, names: tuple[str, ...], revision: str, pin: str | None
    ) -> tuple[list[Path], str]:
        """A model's files, downloaded unless they are here, and the commit of the revision."""
        repo = self.ref.repo
        first = remote_file(repo, names[0], revision, pin)
        known = first.sha256 if pin or len(names) == 1 else None
        paths = self.cache.find_all(first.commit, names, known)
        if paths is None:
            others = [remote_file(repo, name, first.commit, pin) for name in names[1:]]
            self.transfer.fetch_all([first, *others])
            paths = [self.cache.snapshot(first.commit) / name for name in names]
        return paths, first.commit

    def projector_of(self, file: str, files: Mapping[str, int | None]) -> str | None:
        """The smallest projector in a model's folder, else in the nearest folder above it."""
        folders = PurePosixPath(file).parents
        found = [name for name in files if self.with_projector and is_projector(name)]
        for folder in folders:
            beside = [name for name in found if PurePosixPath(name).parent == folder]
            if beside:
                return min(beside, key=lambda name: (files[name] or math.inf, name))
        return None

    def list_files(self, revision: str) -> tuple[str, Mapping[str, int | None]]:
        """The commit of a revision and all its files; the list is cached."""
        commit, files = list_files(self.ref.repo, revision)
        self.cache.remember_files(commit, files)
        return commit, files

    def repository(self) -> Downloaded:
        """The checkpoint or GGUF of a repository, if the reference names no file."""
        commit, files = self.list_files(self.revision)
        folder = self.checkpoint(commit)
        if folder is None:
            chosen = self.choose(commit, files)
            if chosen[0].endswith(".gguf"):
                return self.gguf(chosen[0], commit)
            self.transfer.fetch_all([remote_file(self.ref.repo, name, commit) for name in chosen])
            folder = self.cache.snapshot(commit)
        return Downloaded(folder, commit)

    def checkpoint(self, commit: str) -> Path | None:
        """The folder of a complete checkpoint, unless the reference names a GGUF."""
        return None if self.ref.is_gguf else self.cache.find_checkpoint(commit)

    def choose(self, commit: str, files: Mapping[str, int | None]) -> list[str]:
        """The files to download: a SafeTensors checkpoint, weights last, or one GGUF."""
        present = set() if self.ref.is_gguf else set(files)
        if INDEX in present:
            self.transfer.fetch_all([remote_file(self.ref.repo, INDEX, commit)])
        names = checkpoint_names(present, self.cache.snapshot(commit) / INDEX)
        return names or [self.one_gguf(files)]

    def one_gguf(self, files: Mapping[str, int | None]) -> str:
        """The repository's only GGUF, the named quantisation, or the one that suits this machine;
        raises `ModelError` if there is no such or no single one."""
        models = models_in(files)
        labels = sorted({each.label for each in models} - {""}) or [each.file for each in models]
        if wanted := (self.ref.quantisation or "").upper():
            models = named(models, wanted)
        names = [each.file for each in models]
        choice = of_one_model(models) if len(models) > 1 and not wanted else []
        if wanted and not models:
            what = f"no GGUF in {wanted}" + (f"; it has {', '.join(labels)}." if labels else ".")
        elif not models:
            lacks = no_tokenizer(files)
            what = "neither SafeTensors with a config.json and a tokenizer nor a GGUF file"
            what += f"; {lacks}." if lacks else "."
        elif self.room is not None and choice and not self.safetensors_only:
            room_bytes = self.room()
            chosen = fitting(choice, room_bytes)
            if chosen is not None:
                get_logger().info(
                    "model.quantisation_chosen",
                    file=chosen.file,
                    size_bytes=chosen.size_bytes,
                    memory_bytes=room_bytes,
                    why=f"the largest up to Q8_0 that fills at most {SHARE:.0%} of the memory",
                    others=[each.label for each in choice if each is not chosen],
                )
                return chosen.file
            what = (
                f"no quantisation that fills at most {SHARE:.0%} of {room_bytes:,} bytes here; "
                f"the smallest has {choice[0].size_bytes:,} and is served if it is named: "
                f"hf:{self.ref.repo}::file={choice[0].file}."
            )
        elif len(models) > 1:
            what = (
                f"{len(models)} GGUF files; name one, as in hf:{self.ref.repo}::file={names[0]} "
                f"(others: {', '.join(names[1:6])})."
            )
        elif self.safetensors_only:
            what = "a GGUF; the converter needs SafeTensors."
        else:
            return names[0]
        raise ModelError(f"The repository {self.ref.repo!r} holds {what}", repo=self.ref.repo)
