"""Asks the hub for a file's commit, hash and size, and for the list of a repository's files.

Blocking; runs in the download's thread. huggingface_hub speaks the protocol (endpoint, token,
redirects, ranges); this module translates its exceptions into the worker's errors. The token stays
inside the library: no message or detail here repeats a header or a URL.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import httpx2
import msgspec
from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    get_session,
    parse_ratelimit_headers,
)
from huggingface_hub.utils import logging as hub_logging

from worker.errors import DownloadError, WorkerError, http_words
from worker.models.reference import is_inside_repository
from worker.setting_faults import without_secrets

LIBRARY = "llorch-worker"
"""The worker's name in the hub's request logs."""
TIMEOUT_SECONDS = 10.0
ATTEMPTS = 3
LONGEST_WAIT_SECONDS = 30.0
"""A rate limit with a longer wait is an error at once: the worker can be started again later."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The last one means that the file system cannot hold a file of this size."""

_NAME = re.compile(r"\w[\w.+=-]{0,127}", re.ASCII)
"""Commits and ETags, which become names of files and folders here."""
_SECONDS = re.compile(r"[0-9]{1,9}")
"""A plausible `Retry-After`; any other is ignored."""
_Size = Annotated[int, msgspec.Meta(ge=0)]
_T = TypeVar("_T")

# The library's warnings repeat the worker's errors, with signed URLs in them.
hub_logging.set_verbosity(logging.ERROR)


class Stopped(Exception):
    """The worker is shutting down, and nobody waits for this download."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub describes it."""

    name: str
    commit: str
    etag: str
    """The SHA-256 of a large file or the Git hash of a small one; the name of its blob."""
    size_bytes: int | None
    in_xet: bool
    """Whether the hub serves it in content-addressed chunks (Xet)."""
    pin: str | None
    """The SHA-256 that `models.toml` demands, if any."""

    @property
    def sha256(self) -> str | None:
        """The SHA-256 of its content, if it is pinned or the hub's ETag. It must be passed to
        checks of a cached file: a copy, unlike a link to the blob, does not have it in its name."""
        by_hub = self.etag if re.fullmatch("[0-9a-f]{64}", self.etag) else None
        return self.pin or by_hub


def remote_file(repo: str, name: str, revision: str, pin: str | None = None) -> RemoteFile:
    """Ask the hub for a file's commit, ETag and size; raises `DownloadError`."""
    url = hf_hub_url(repo, name, revision=revision)
    found = _with_retries(
        repo, name, lambda: get_hf_file_metadata(url, timeout=TIMEOUT_SECONDS, library_name=LIBRARY)
    )
    if not _NAME.fullmatch(found.commit_hash or "") or not _NAME.fullmatch(found.etag or ""):
        raise _not_a_hub(repo)
    if found.size is not None and found.size < 0:
        raise _not_a_hub(repo)
    commit, etag, in_xet = str(found.commit_hash), str(found.etag), found.xet_file_data is not None
    return RemoteFile(name, commit, etag, found.size, in_xet, pin)


def list_files(repo: str, revision: str) -> tuple[str, dict[str, int | None]]:
    """A revision's commit, and all its files with their known sizes; raises `DownloadError`."""
    commit, files = _with_retries(repo, None, lambda: _listing(repo, revision))
    for name in files:
        if not is_inside_repository(name):
            raise DownloadError(
                f"The hub lists the file {name!r} for {repo!r}, which is not a path inside "
                "a repository; nothing was downloaded.",
                reason="listing",
                repo=repo,
            )
    return commit, files


def _listing(repo: str, revision: str) -> tuple[str, dict[str, int | None]]:
    api = HfApi(library_name=LIBRARY)
    try:
        info = api.model_info(repo, revision=revision, timeout=TIMEOUT_SECONDS, files_metadata=True)
        siblings = info.siblings or []
        files = msgspec.convert(
            {each.rfilename: each.size for each in siblings}, dict[str, _Size | None]
        )
    except (KeyError, TypeError, ValueError) as error:  # not JSON, or of another form
        raise _not_a_hub(repo) from error
    if not _NAME.fullmatch(info.sha or ""):
        raise _not_a_hub(repo)
    return str(info.sha), files


def _endpoint() -> str:
    """The hub's address for messages, without the password that a mirror's may contain."""
    return without_secrets(constants.ENDPOINT)


def _asked(error: httpx2.HTTPError) -> str:
    """The address that was asked, for messages: the hub's, or a storage's that it redirects to."""
    try:
        url = error.request.url
    except RuntimeError:  # it failed before there was a request
        return _endpoint()
    return f"{url.scheme}://{url.netloc.decode()}"  # without password, path and signature


def _not_a_hub(repo: str) -> DownloadError:
    return DownloadError(
        f"{_endpoint()} did not say which commit, content and size {repo!r} has, so it "
        "does not speak the hub's protocol; check HF_ENDPOINT and the proxy.",
        reason="network",
        repo=repo,
    )


def _with_retries(repo: str, name: str | None, ask: Callable[[], _T]) -> _T:
    """Repeat a request after a transient fault or a short rate limit, but not after a final answer.

    NOTE: the library's own retries (`retry_on_errors`) take too long when the hub is down: a cached
    model should be served sooner.
    """
    try:
        get_session()
    except Exception as error:
        why = f"The hub cannot be asked for {repo!r}: {http_words(error)}."
        raise DownloadError(why, reason="network", repo=repo) from error
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with translated_errors(repo, name):
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
def translated_errors(repo: str, name: str | None) -> Iterator[None]:
    """Translate huggingface_hub's exceptions into the worker's errors."""
    try:
        yield
    except (WorkerError, Stopped):
        raise
    except LocalEntryNotFoundError as error:
        # The library's request failed and its cache did not have the file; the cause is the
        # request's error.
        raise _translated(repo, name, error.__cause__ or error) from error
    except (OSError, ValueError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
        raise _translated(repo, name, error) from error


def _translated(repo: str, name: str | None, error: BaseException) -> DownloadError:
    what = f"{name!r} of {repo!r}" if name else f"The repository {repo!r}"
    details: dict[str, Any] = {"repo": repo}
    if isinstance(error, HfHubHTTPError):
        details["status"] = int(error.response.status_code)
        if later := _retry_after_seconds(error.response.headers):
            details["retry_after_seconds"] = later
    reason, sentence = _cause(error, details)
    return DownloadError(f"{what} {sentence}.", reason=reason, **details)


def _cause(error: BaseException, details: Mapping[str, Any]) -> tuple[str, str]:
    """The code of a failure, and a sentence whose subject, the file or repository, is missing."""
    match error, details.get("status"):
        case RevisionNotFoundError(), _:
            return "not_found", "cannot be downloaded: the repository has no such revision"
        case RemoteEntryNotFoundError(), _:
            return "not_found", "does not exist: the repository has no such file"
        case GatedRepoError(), _:
            return (
                "forbidden",
                "is gated or private and this account has no access; ask for it on the "
                "repository's page and set HF_TOKEN to that account's token",
            )
        case _, 403:
            return (
                "forbidden",
                "is refused (403): this account has no access, its token may not read it, or a "
                "proxy blocks it; check the repository's page, HF_TOKEN and the proxy",
            )
        case _, 401:
            return (
                "unauthorized",
                "does not exist or needs a valid token; check the name and set HF_TOKEN",
            )
        case _, 404:
            return "not_found", "does not exist on the hub"
        case _, 429:
            later = details.get("retry_after_seconds")
            when = f"in {later} s" if later else "later, or set HF_TOKEN for a higher limit"
            return "rate_limited", f"is refused by the hub's rate limit (429); try again {when}"
        case _, int(status):
            return "network", f"cannot be downloaded: the hub answered {status}"
        case OfflineModeIsEnabled(), _:
            return (
                "offline",
                "is not in the cache and offline mode is on; unset HF_HUB_OFFLINE to download it",
            )
        case httpx2.TooManyRedirects(), _:
            return (
                "network",
                f"could not be downloaded: {_endpoint()} redirects without end; check HF_ENDPOINT "
                "and the proxy",
            )
        case httpx2.HTTPError(), _:
            why = f"no connection to {_asked(error)}: {http_words(error)}"
            return "network", f"could not be downloaded: {why}"
        case OSError(errno=number), _ if number in DISK_FULL:
            return (
                "disk_full",
                "could not be stored: the disk is full; the part received so far is kept, and the "
                "next start resumes it",
            )
        case OSError(strerror=str(why)), _ if not isinstance(error, ConnectionError):
            return "cache", f"could not be stored: {why}; choose another folder with --cache-dir"
    return "network", "could not be downloaded completely; the next start resumes it"


def _retry_after_seconds(headers: Any) -> int | None:
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return int(limit.reset_in_seconds)
    value = str(headers.get("retry-after", ""))
    return int(value) if _SECONDS.fullmatch(value) else None
