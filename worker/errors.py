"""Every failure that a user can meet, with its wire code, HTTP status and exit code.

Any room may raise them, on either side of the engine pipe. The dialects of `api` turn them into
HTTP responses and the last event of a stream, and `main` turns them into an exit code. `details`
has numbers and paths for machines.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

MOST_CHARS = 4_000
"""The most characters of a message, and of each text in its details."""
_FIRST_CHARS, _LAST_CHARS = 1_000, 500
_READ_BY_HTTPX = frozenset({
    "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"
})  # fmt: skip
"""Environment variables, in upper or lower case."""


def shortened(message: str) -> str:
    """The message without its middle if it is too long, which is because it quotes a long value.
    The value's beginning and the reason for the refusal remain."""
    if len(message) <= MOST_CHARS:
        return message
    cut = f"… ({len(message):,} characters in all) …"
    return message[:_FIRST_CHARS] + cut + message[-_LAST_CHARS:]


def escaped(text: str) -> str:
    """The text on one line, safe for a terminal: all unprintable characters are escaped as in
    Python."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


class WorkerError(Exception):
    """Base of all failures: a stable `code`, and a message of one sentence for the user.

    All are direct subclasses, so `__subclasses__` finds each by code or status.
    """

    code: ClassVar[str] = "INFERENCE_FAILED"
    status: ClassVar[int] = 500
    retriable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **details: Any) -> None:
        self.message = shortened(message)
        super().__init__(self.message)
        self.details: dict[str, Any] = {
            key: shortened(value) if isinstance(value, str) else value
            for key, value in details.items()
        }


def error_of(code: str, message: str, details: dict[str, Any]) -> WorkerError:
    """Rebuild an error from the code, message and details that another process sent.

    Raises `ValueError` for an unknown code.
    """
    for kind in WorkerError.__subclasses__():
        if kind.code == code:
            error = kind(message)
            error.details = details
            return error
    raise ValueError(f"there is no error with the code {code!r}")


# --- one request fails -------------------------------------------------------------------


class InvalidRequest(WorkerError):
    """The body, a header or a parameter violates the contract.

    `details["errors"]` can have a list of `{"field", "constraint", "message", "value"?}`.
    """

    code = "INVALID_REQUEST"
    status = 400

    @classmethod
    def of_field(cls, field: str, why: str) -> InvalidRequest:
        """The error for one `field` of a request."""
        return cls(f"{field}: {why}", field=field)


class Unauthorized(WorkerError):
    code = "UNAUTHORIZED"
    status = 401


class Forbidden(WorkerError):
    """The request may come from a web page that is not allowed to use this worker."""

    code = "FORBIDDEN"
    status = 403


class JobNotFound(WorkerError):
    code = "JOB_NOT_FOUND"
    status = 404


class ModelNotFound(WorkerError):
    """The request names a model that this worker does not serve."""

    code = "MODEL_NOT_FOUND"
    status = 404


class PathNotFound(WorkerError):
    code = "NOT_FOUND"
    status = 404


class MethodNotAllowed(WorkerError):
    """`details["allowed"]` has the methods of the path."""

    code = "METHOD_NOT_ALLOWED"
    status = 405


class DuplicateJob(WorkerError):
    code = "DUPLICATE_JOB"
    status = 409


class ContextLengthExceeded(WorkerError):
    """`details`: `prompt_tokens`, `context_length`."""

    code = "CONTEXT_LENGTH_EXCEEDED"
    status = 400


class PayloadTooLarge(WorkerError):
    code = "PAYLOAD_TOO_LARGE"
    status = 413


class QueueFull(WorkerError):
    """`details["retry_after_seconds"]` becomes the `Retry-After` header."""

    code = "QUEUE_FULL"
    status = 503
    retriable = True


class NotReady(WorkerError):
    code = "NOT_READY"
    status = 503
    retriable = True


class ShuttingDown(WorkerError):
    code = "SHUTTING_DOWN"
    status = 503
    retriable = True


class InferenceTimeout(WorkerError):
    code = "INFERENCE_TIMEOUT"
    status = 504
    retriable = True


class Cancelled(WorkerError):
    code = "CANCELLED"
    status = 499


class InferenceFailed(WorkerError):
    code = "INFERENCE_FAILED"
    retriable = True


class EngineCrashed(WorkerError):
    code = "ENGINE_CRASHED"
    retriable = True


class VramOom(WorkerError):
    code = "VRAM_OOM"
    retriable = True


# --- the worker does not start -----------------------------------------------------------


class ConfigError(WorkerError):
    """A setting is unknown or out of range; `details["field"]` names it."""

    code = "INVALID_CONFIG"
    exit_code = 2


class ModelError(WorkerError):
    """The model is missing, corrupt or of an unsupported kind."""

    code = "MODEL_LOAD_FAILED"
    exit_code = 3


class BackendMismatch(WorkerError):
    """The wheel, the driver or the device is not what the command asks for."""

    code = "BACKEND_MISMATCH"
    exit_code = 4


class InsufficientVram(WorkerError):
    """`details`: `needed_bytes`, `available_bytes`, and the plan's parts."""

    code = "INSUFFICIENT_VRAM"
    exit_code = 5


class ResidencyViolation(WorkerError):
    code = "RESIDENCY_VIOLATION"
    exit_code = 5


class DownloadError(WorkerError):
    """`details["reason"]`: unauthorized, forbidden, not_found, rate_limited, disk_full, cache,
    offline, listing, checksum or network."""

    code = "DOWNLOAD_FAILED"
    exit_code = 6


class PortInUse(WorkerError):
    code = "PORT_IN_USE"
    exit_code = 7


class CallbackFailed(WorkerError):
    """The pool manager did not accept the ready callback in time."""

    code = "CALLBACK_FAILED"


class CrashLoop(WorkerError):
    code = "ENGINE_CRASH_LOOP"
    exit_code = 8


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def wrong_value(field: str, value: object, why: str) -> ConfigError:
    """The error for a setting's value; `why` completes the sentence, as in "which is too long"."""
    return ConfigError(f"{flag(field)} is {value!r}, {why}.", field=field)


@contextmanager
def of_flag(name: str) -> Iterator[None]:
    """Prefix errors from the block with the flag whose value caused them."""
    try:
        yield
    except WorkerError as error:
        raise type(error)(f"{name}: {error.message}", **error.details) from error.__cause__


def not_utf8(error: UnicodeEncodeError) -> ConfigError:
    """The error for a file name that is not valid UTF-8."""
    return ConfigError(
        f"The name {error.object!r} is not UTF-8; give the file or its folder another name."
    )


@contextmanager
def of_file(path: Path) -> Iterator[None]:
    """Make each `OSError` from the block name the file, even if it comes from an open file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def of_lock() -> Iterator[None]:
    """Make an `OSError` from locking a file say so if its file system has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        why = f"its file system has no file locks ({error.strerror})"
        raise OSError(error.errno, why, error.filename) from None


_REMEDIES = {
    errno.EPERM: "a sandbox such as seccomp may forbid it",
    errno.ENOSYS: "a sandbox such as seccomp may forbid it",
    errno.ENOLCK: "the file system has no file locks",
    errno.EAGAIN: "raise ulimit -u, or the container's --pids-limit",
    errno.EMFILE: "raise ulimit -n",
    errno.EFBIG: "raise ulimit -f",
    errno.ENOMEM: "raise ulimit -v or -d, or the memory of the container",
}
"""What refuses a system call that names no file, or which limit to raise."""


def system_words(error: OSError) -> str:
    """An `OSError` in the system's words, with the file, or else with the code that raised it and
    the likely cause."""
    words = error.strerror or str(error)
    if error.filename:
        return f"{error.filename}: {words}"
    try:
        os.getcwd()
    except FileNotFoundError as gone:  # as for every relative path
        if gone.errno == error.errno:
            return f"The working folder no longer exists: {words}"
    described = words
    for frame, line in traceback.walk_tb(error.__traceback__):
        place = os.path.basename(frame.f_code.co_filename)
        described = f"{words} ({frame.f_code.co_name}, {place}, line {line})"
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{described}: {remedy}" if remedy else described


def system_failure(error: Exception) -> WorkerError | None:
    """The failure to report if the error means that the system refused something, else `None`."""
    if isinstance(error, OSError):
        return WorkerError(system_words(error))
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # Python's words
        limits = "ulimit -u, -v or -d, or the container's --pids-limit"
        return WorkerError(f"The system allows no more threads for this user: raise {limits}.")
    if isinstance(error, MemoryError):
        limits = "ulimit -v or -d, or the memory of the container"
        return WorkerError(f"The system gives this process no more memory: raise {limits}.")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, ImportError) and str(cause.path).endswith((".so", ".dylib")):
        remedy = "raise ulimit -v or -d if memory is short, else install the worker again"
        return WorkerError(f"A library of {sys.prefix} cannot be loaded: {cause}; {remedy}.")
    return None


def _reason_of(error: BaseException) -> BaseException | None:
    """The error that explains this one, if there is one."""
    return error.__cause__ or (None if isinstance(error, OSError) else error.__context__)


def http_words(error: Exception) -> str:
    """Why an HTTP client cannot be created or cannot connect: in the system's words, which
    libraries replace with their own, and with the proxy and certificate variables that are set."""
    variables = ", ".join(name for name in os.environ if name.upper() in _READ_BY_HTTPX)
    kind = type(error).__name__
    cause: BaseException = error
    # If several addresses were tried, a group has the cause of each. The context of an `OSError`
    # explains nothing: it may be that a TLS socket had nothing to read.
    while deeper := getattr(cause, "exceptions", (_reason_of(cause),))[0]:
        cause = deeper
    why = str(cause if isinstance(cause, OSError) else error)
    is_safe = kind not in {"InvalidURL", "LocalProtocolError"}  # they quote secrets
    described = f"{kind}: {why}" if why and is_safe else kind
    return f"{described} (in the environment: {variables or 'no proxy'})"


def rebuild_error(reported: Mapping[str, Any], otherwise: type[WorkerError]) -> WorkerError:
    """The error that a command reported as JSON, in its own class; `otherwise` is the class for an
    unknown code."""
    message, details = reported.get("message"), reported.get("details")
    content = str(message or "It gave no reason."), dict(details or {})
    try:
        return error_of(str(reported.get("code")), *content)
    except ValueError:
        return error_of(otherwise.code, *content)
