"""A hub reference in, verified files on this disk out.

`download` is called on the API process's event loop; the work runs in one daemon thread, so that
a worker that is told to stop leaves at once, and a later start resumes from what has come.

A reference pinned to a commit whose files are here makes no network call at all. A branch or tag
is asked for at each start; where the hub cannot answer (no network, rate limit), the files that
it meant last time serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from worker.errors import DownloadError, ModelError
from worker.messages import Progress
from worker.models import hub
from worker.models.checkpoint_files import CONFIG_FILES, INDEX, TEMPLATES
from worker.models.gguf import split_names
from worker.models.hub import RemoteFile
from worker.models.hub_cache import RepoCache
from worker.models.reference import HubReference
from worker.models.transfer import OnProgress, Transfer
from worker.observability.logs import get_logger

DEFAULT_REVISION = "main"

_TEMPLATE = re.compile(rf"{TEMPLATES}/[^/]+\.jinja")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Downloaded:
    """Where the model lies: a GGUF (its first part), or a folder of SafeTensors."""

    path: Path
    commit: str
    is_folder: bool


async def download(
    ref: HubReference,
    *,
    cache_dir: Path,
    sha256: str | None,
    on_progress: OnProgress,
    safetensors_only: bool = False,
) -> Downloaded:
    """Fetch what `ref` names; raises `DownloadError`, or `ModelError` where it names no model.

    With `safetensors_only` a GGUF is not a model, and is refused before it is fetched.
    """
    loop = asyncio.get_running_loop()

    def report(progress: Progress) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody listens any more
            loop.call_soon_threadsafe(on_progress, progress)

    return await _in_daemon_thread(
        lambda stop: _Download(ref, cache_dir, sha256, report, stop, safetensors_only).run()
    )


async def _in_daemon_thread(work: Callable[[threading.Event], _T]) -> _T:
    """Run blocking work so that neither a cancelled task nor the exit waits for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()
    stop = threading.Event()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work(stop)
        except BaseException as caught:  # noqa: B036 - handed to whoever awaits
            error = caught
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="model-download", daemon=True).start()
    try:
        return await done
    finally:
        stop.set()


@dataclass(slots=True)
class _Download:
    """One reference on its way; lives in the download thread."""

    ref: HubReference
    cache_dir: Path
    sha256: str | None
    report: OnProgress
    stop: threading.Event
    safetensors_only: bool
    cache: RepoCache = field(init=False)
    transfer: Transfer = field(init=False)
    revision: str = field(init=False)

    def __post_init__(self) -> None:
        self.cache = RepoCache(self.cache_dir, self.ref.repo)
        self.transfer = Transfer(self.cache, self.report, self.stop)
        self.revision = self.ref.revision or DEFAULT_REVISION

    def run(self) -> Downloaded:
        self.report(Progress("download", 0.0))
        try:
            if self.ref.file is not None:
                return self.gguf(self.ref.file)
            return self.repository()
        except OSError as error:
            raise DownloadError(
                f"The cache folder {str(self.cache.root)!r} cannot be written: {error.strerror}; "
                "choose another with --cache-dir.",
                reason="disk_full" if error.errno in hub.DISK_FULL else "cache",
                repo=self.ref.repo,
            ) from error

    # --- one GGUF, whole or in parts -----------------------------------------------------

    def gguf(self, file: str) -> Downloaded:
        names = list(split_names(file))
        pins = {file: self.sha256} if self.sha256 else {}
        if self.ref.is_pinned:
            cached = self.cache.find_all(self.revision, names, pins)
            if cached is not None:
                return Downloaded(cached[names[0]], self.revision, is_folder=False)
        try:
            first = self.describe(names[0], self.revision)
        except DownloadError as error:
            return self.last_known(names, pins, error)
        self.cache.remember_commit(self.revision, first.commit)
        cached = self.cache.find_all(first.commit, names, pins)
        if cached is None:
            others = [self.describe(name, first.commit) for name in names[1:]]
            self.transfer.fetch_all([first, *others], pins)
            cached = {name: self.cache.path(first.commit, name) for name in names}
        return Downloaded(cached[names[0]], first.commit, is_folder=False)

    def last_known(
        self, names: list[str], pins: dict[str, str], error: DownloadError
    ) -> Downloaded:
        """What the revision meant when the hub last answered, if all of it is here."""
        if error.details.get("reason") in ("network", "rate_limited", "offline"):
            commit = self.cache.commit_of(self.revision)
            cached = self.cache.find_all(commit, names, pins) if commit else None
            if commit is not None and cached is not None:
                self.warn_stale(commit, error)
                return Downloaded(cached[names[0]], commit, is_folder=False)
        raise error

    # --- a repository without a file -----------------------------------------------------

    def repository(self) -> Downloaded:
        commit = self.cache.commit_of(self.revision) if self.ref.is_pinned else None
        known = self.snapshot_folder(commit)
        if known is not None:
            return known
        try:
            self.require_network(None)
            commit, listing = hub.list_files(self.ref.repo, self.revision)
        except DownloadError as error:
            commit = self.cache.commit_of(self.revision)
            known = self.snapshot_folder(commit)
            if known is None or commit is None:
                raise
            self.warn_stale(commit, error)
            return known
        self.cache.remember_commit(self.revision, commit)
        known = self.snapshot_folder(commit)
        if known is not None:
            return known
        names = self.choose(commit, listing)
        if names[0].endswith(".gguf") and self.safetensors_only:
            raise ModelError(
                f"The repository {self.ref.repo!r} holds a GGUF; the converter needs SafeTensors.",
                repo=self.ref.repo,
            )
        if names[0].endswith(".gguf"):
            return self.gguf(names[0])
        self.transfer.fetch_all([self.describe(name, commit) for name in names], {})
        self.cache.store_listing(commit, names)
        return Downloaded(self.cache.snapshot(commit), commit, is_folder=True)

    def snapshot_folder(self, commit: str | None) -> Downloaded | None:
        """A complete SafeTensors snapshot of a commit, where it is here."""
        names = self.cache.listing(commit) if commit else None
        if commit is None or not names:
            return None
        if not all(self.cache.find(commit, name) for name in names):
            return None
        return Downloaded(self.cache.snapshot(commit), commit, is_folder=True)

    def choose(self, commit: str, listing: list[str]) -> list[str]:
        """The files of a SafeTensors checkpoint, or the one GGUF of a repository of GGUFs."""
        present = set(listing)
        if INDEX in present:
            self.transfer.fetch_all([self.describe(INDEX, commit)], {})
            weights = [INDEX, *self.shards(commit)]
        elif "model.safetensors" in present:
            weights = ["model.safetensors"]
        else:
            weights = sorted(
                name for name in present if name.endswith(".safetensors") and "/" not in name
            )
        if weights and "config.json" in present:
            small = [name for name in CONFIG_FILES if name in present]
            small += sorted(name for name in present if _TEMPLATE.fullmatch(name))
            return [*small, *weights]
        ggufs = sorted(name for name in present if name.endswith(".gguf"))
        models = [name for name in ggufs if split_names(name)[0] == name]
        if len(models) == 1:
            return models
        if models:
            raise ModelError(
                f"The repository {self.ref.repo!r} holds {len(models)} GGUF files; name one, as in "
                f"hf:{self.ref.repo}::file={models[0]} (others: {', '.join(models[1:6])}).",
                repo=self.ref.repo,
            )
        raise ModelError(
            f"The repository {self.ref.repo!r} holds neither SafeTensors with a config.json nor a "
            "GGUF file.",
            repo=self.ref.repo,
        )

    def shards(self, commit: str) -> list[str]:
        """The shards that a checkpoint's index names."""
        try:
            weight_map = json.loads(self.cache.path(commit, INDEX).read_bytes())["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"The file {INDEX!r} of {self.ref.repo!r} is not an index of shards.",
                repo=self.ref.repo,
            ) from error
        for shard in shards:
            if not isinstance(shard, str) or "/" in shard or not shard.endswith(".safetensors"):
                raise ModelError(
                    f"The file {INDEX!r} of {self.ref.repo!r} names the odd shard {shard!r}.",
                    repo=self.ref.repo,
                )
        return shards

    # --- the hub -------------------------------------------------------------------------

    def describe(self, name: str, revision: str) -> RemoteFile:
        self.require_network(name)
        return hub.describe(self.ref.repo, name, revision)

    def require_network(self, name: str | None) -> None:
        if hub.is_offline():
            raise hub.offline_error(self.ref.repo, name)

    def warn_stale(self, commit: str, error: DownloadError) -> None:
        get_logger().warning(
            "model.revision_unchecked",
            repo=self.ref.repo,
            revision=self.revision,
            commit=commit,
            reason=error.details.get("reason"),
        )
