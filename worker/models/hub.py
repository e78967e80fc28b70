"""The hub, through huggingface_hub: what a file is, what a repository holds, and its bytes.

Blocking; runs in the download's thread. huggingface_hub does all of the protocol (endpoint,
token, redirects, ranges, retries within a transfer); this file calls it and says its failures in
our words. The token never leaves it: no message or detail here repeats a header or a URL.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from worker.errors import DownloadError, WorkerError

TIMEOUT_SECONDS = 10.0
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Also a file system that cannot hold a file of this size."""
ATTEMPTS = 3
LONGEST_WAIT_SECONDS = 30.0
"""A rate limit that lasts longer is told at once; whoever started us can start us later."""

_T = TypeVar("_T")


class Stopped(Exception):
    """The worker is shutting down; nobody waits for this download any more."""


class ByteCounter(Protocol):
    """Told what arrives; may raise `Stopped` to end the transfer."""

    def begin(self, n_bytes_here: int) -> None: ...

    def add(self, n_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub describes it."""

    name: str
    commit: str
    etag: str
    size_bytes: int | None


def endpoint() -> str | None:
    """`HF_ENDPOINT` as it is now; `None` is the public hub."""
    return (os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None


def is_offline() -> bool:
    """Whether the user forbids the network, by either variable that huggingface_hub reads."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def describe(repo: str, name: str, revision: str) -> RemoteFile:
    """Ask the hub for a file's commit, ETag and size; raises `DownloadError`."""
    from huggingface_hub import get_hf_file_metadata

    metadata = _patiently(
        repo,
        name,
        lambda: get_hf_file_metadata(
            _url(repo, name, revision), timeout=TIMEOUT_SECONDS, headers=_headers()
        ),
    )
    if metadata.commit_hash is None or metadata.etag is None:
        raise DownloadError(
            f"{endpoint() or 'The hub'} did not say which commit {repo!r} is at, so it does not "
            "speak the hub's protocol; check HF_ENDPOINT and the proxy.",
            reason="network",
            repo=repo,
        )
    return RemoteFile(name, metadata.commit_hash, metadata.etag, metadata.size)


def list_files(repo: str, revision: str) -> tuple[str, list[str]]:
    """The commit of a revision and the names of all its files; raises `DownloadError`."""
    from huggingface_hub import HfApi

    _headers()
    api = HfApi(endpoint=endpoint(), library_name="llorch-worker")
    info = _patiently(
        repo, None, lambda: api.model_info(repo, revision=revision, timeout=TIMEOUT_SECONDS)
    )
    if info.sha is None:
        raise DownloadError(
            f"The hub did not say which commit {repo!r} is at.", reason="network", repo=repo
        )
    return info.sha, [sibling.rfilename for sibling in info.siblings or []]


def fetch(repo: str, file: RemoteFile, partial: Path, counter: ByteCounter, label: str) -> None:
    """Bring `partial` to the file's full length, from where it stands; raises `DownloadError`."""
    from huggingface_hub.file_download import http_get

    partial.parent.mkdir(parents=True, exist_ok=True)
    with _told(repo, file.name), partial.open("ab") as out:
        have = out.tell()
        if file.size_bytes is not None and have > file.size_bytes:
            out.truncate(0)
            have = 0
        counter.begin(have)
        http_get(
            _url(repo, file.name, file.commit),
            out,
            resume_size=have,
            headers=_headers(),
            expected_size=file.size_bytes,
            displayed_filename=label,
            tqdm_class=_progress_bar(counter),
        )
        out.flush()
        os.fsync(out.fileno())


def _url(repo: str, name: str, revision: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, name, revision=revision, endpoint=endpoint())


def _headers() -> dict[str, str]:
    """With the user's token, where there is one."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils import logging as hub_logging

    # Its warnings repeat what we say ourselves, with URLs in them.
    hub_logging.set_verbosity(logging.ERROR)
    return dict(build_hf_headers(library_name="llorch-worker"))


def _progress_bar(counter: ByteCounter) -> Any:
    """huggingface_hub's bar (shown on a terminal alone) that also counts for us."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class CountingBar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            counter.add(int(n or 0))
            shown: bool | None = super().update(n)
            return shown

    return CountingBar


def _patiently(repo: str, name: str | None, ask: Callable[[], _T]) -> _T:
    """Ask again after a passing fault or a short rate limit, not after a final answer."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _told(repo, name):
                return ask()
        except DownloadError as error:
            if error.details.get("reason") not in ("network", "rate_limited"):
                raise
            wait = float(error.details.get("retry_after_seconds") or 2 ** (attempt - 1))
            if attempt == ATTEMPTS or wait > LONGEST_WAIT_SECONDS:
                raise
            time.sleep(wait)
    raise AssertionError("the loop above always returns or raises")


@contextmanager
def _told(repo: str, name: str | None) -> Iterator[None]:
    """Say what huggingface_hub raises as one of our errors."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except (WorkerError, Stopped):
        raise
    except OfflineModeIsEnabled as error:
        raise offline_error(repo, name) from error
    except HfHubHTTPError as error:
        raise _http_error(repo, name, error) from error
    except httpx2.HTTPError as error:
        where = endpoint() or "the hub"
        raise DownloadError(
            f"{_what(repo, name)} could not be downloaded: no connection to {where} "
            f"({type(error).__name__}).",
            reason="network",
            repo=repo,
        ) from error
    except (OSError, ValueError) as error:
        raise _local_error(repo, name, error) from error


def _what(repo: str, name: str | None) -> str:
    return f"{name!r} of {repo!r}" if name else f"The repository {repo!r}"


def offline_error(repo: str, name: str | None) -> DownloadError:
    return DownloadError(
        f"{_what(repo, name)} is not in the cache and offline mode is on; unset HF_HUB_OFFLINE "
        "to download it.",
        reason="offline",
        repo=repo,
    )


def _http_error(repo: str, name: str | None, error: Any) -> DownloadError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RemoteEntryNotFoundError,
        RevisionNotFoundError,
    )

    status = int(error.response.status_code)
    what = _what(repo, name)
    details: dict[str, Any] = {"repo": repo, "status": status}
    if isinstance(error, RevisionNotFoundError):
        reason, sentence = "not_found", f"{what}: the repository has no such revision."
    elif isinstance(error, RemoteEntryNotFoundError):
        reason, sentence = "not_found", f"The repository {repo!r} has no file {name!r}."
    elif isinstance(error, GatedRepoError) or status == 403:
        reason = "forbidden"
        sentence = (
            f"{what} is gated or private and this account has no access; ask for it on the "
            "repository's page and set HF_TOKEN to that account's token."
        )
    elif status == 401:
        reason = "unauthorized"
        sentence = f"{what} does not exist or needs a valid token; check the name and set HF_TOKEN."
    elif status == 404:
        reason, sentence = "not_found", f"{what} does not exist on the hub."
    elif status == 429:
        reason = "rate_limited"
        details["retry_after_seconds"] = _retry_after_seconds(error.response.headers)
        later = details["retry_after_seconds"]
        sentence = f"The hub limits our requests (429) for {what}; try again " + (
            f"in {later} s." if later else "later, or set HF_TOKEN for a higher limit."
        )
    else:
        reason, sentence = "network", f"{what}: the hub answered {status}."
    return DownloadError(sentence, reason=reason, **details)


def _retry_after_seconds(headers: Any) -> int | None:
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds
    value = str(headers.get("retry-after", ""))
    return int(value) if value.isdigit() else None


def _local_error(repo: str, name: str | None, error: OSError | ValueError) -> DownloadError:
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return DownloadError(
            f"The disk is full: {_what(repo, name)} could not be stored; what has come so far is "
            "kept, and the next start goes on from there.",
            reason="disk_full",
            repo=repo,
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "it was cut short"
    return DownloadError(
        f"The download of {_what(repo, name)} failed: {reason}; the next start resumes it.",
        reason="network",
        repo=repo,
    )
