"""Clients of a running worker, and workers that a command starts as its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

import httpx

from worker.errors import WorkerError, rebuild_error, wrong_value
from worker.observability.terminal import LiveLine
from worker.setting_faults import ENV_PREFIX, variable_of
from worker.setting_files import check_certificate, read_keys
from worker.settings import ALIASES, BACKEND_FIELDS, FIELDS, Settings, flags_for, group_of
from worker.sockets import uri_of
from worker.wire.messages import Progress

CONNECT_SECONDS = 10.0
_MOST_BYTES = 1 << 20


def headers_of(settings: Settings) -> dict[str, str]:
    """The headers of a request to a worker with these settings."""
    token = settings.worker_token
    if token is None and settings.api_key_file is not None:
        token = next(iter(read_keys(settings.api_key_file)))
    return {"Authorization": f"Bearer {token}"} if token else {}


def client_of(settings: Settings, *, is_probe: bool = False) -> httpx.Client:
    """A client of the worker that listens where the settings say.

    It trusts only that worker's certificate, whatever names are in it. A probe sends no secret, and
    trusts any certificate.

    Raises:
        ConfigError: the certificate or the file of keys is missing or wrong.
    """
    trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusted.check_hostname = False
    if is_probe:
        trusted.verify_mode = ssl.CERT_NONE
    elif settings.certificate is not None:
        check_certificate(settings.certificate)
        trusted.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        trusted.load_verify_locations(settings.certificate[0])
    # A worker that listens on all addresses is reached at the loopback address.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host[0], settings.host[0])
    uri = uri_of(host, settings.port, is_secure=settings.certificate is not None)
    try:
        url = httpx.URL(uri + settings.api_prefix)
    except httpx.InvalidURL as error:
        raise wrong_value("host", host, f"which is not a host: {error}") from None
    return httpx.Client(
        base_url=url,
        headers={} if is_probe else headers_of(settings),
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        trust_env=False,
        transport=httpx.HTTPTransport(verify=trusted, uds=settings.socket_path),
    )


def answer_of(client: httpx.Client, path: str, seconds: float) -> tuple[int, str]:
    """The status and the body of a worker's answer to a GET. Raises `httpx.HTTPError` if it does
    not end within `seconds`, or is larger than any worker's."""
    body, ends_at = bytearray(), time.monotonic() + seconds
    with client.stream("GET", path, timeout=seconds) as response:
        for piece in response.iter_bytes():
            body += piece
            if len(body) > _MOST_BYTES or time.monotonic() > ends_at:
                raise httpx.ReadTimeout("its answer does not end")
    return response.status_code, body.decode("utf-8", "replace")


@contextlib.contextmanager
def no_worker_at(where: object, kind: type[WorkerError] = WorkerError) -> Iterator[None]:
    """Raise `kind` if reading an answer in the block shows that no worker sent it."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RecursionError):
        raise kind(f"What answers at {where} is not a worker.") from None


def disconnected(error: httpx.HTTPError) -> WorkerError:
    return WorkerError(
        f"The connection to the worker was lost: {str(error) or type(error).__name__}."
    )


@contextlib.contextmanager
def own_worker(settings: Settings, *, n_slots: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start a worker with these settings and at least `n_slots` slots; yields its address and the
    `model_ref`, `device` and `seconds` of its ready line.

    Raises:
        WorkerError: the worker did not start.
    """
    # It has its own process group, so that the terminal's Ctrl-C does not reach it. It binds itself
    # to this process, because Python loses a Ctrl-C that arrives during a `preexec_fn`.
    code = f"""
from worker.background import die_with_parent
die_with_parent({int(signal.SIGTERM)}, {os.getpid()})
from worker.cli import {settings.backend} as run
run()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *_flags(settings, n_slots)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(settings),
        process_group=0,
    )
    try:
        assert process.stderr is not None
        ready = _wait_until_ready(process.stderr, headers_of(settings))
        threading.Thread(target=process.stderr.read, daemon=True).start()  # empties the pipe
        yield ready["uri"], {key: ready[key] for key in ("model_ref", "device", "seconds")}
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _environment(settings: Settings) -> dict[str, str]:
    """This process's environment without settings, except for the token."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    for alias in ALIASES.values():
        kept.pop(alias, None)
    if settings.worker_token is not None:
        kept[variable_of("worker_token")] = settings.worker_token
    return kept


def _flags(settings: Settings, n_slots: int) -> list[str]:
    """Flags to serve the same model in the same way, without a pool, at an address of its own."""
    served = {
        name: getattr(settings, name)
        for name, info in FIELDS.items()
        if group_of(info) not in ("server", "pool")
        and BACKEND_FIELDS.get(name, settings.backend) == settings.backend
    }
    served["slots"] = max(settings.engine.slots, n_slots)
    served |= {"host": ("127.0.0.1",), "port": 0, "log_format": "json"}
    given = ((name, value) for name, value in served.items() if value not in (None, ()))
    return [each for name, value in given for each in flags_for(name, value)]


def _wait_until_ready(log: IO[str], headers: dict[str, str]) -> dict[str, Any]:
    failure: dict[str, Any] = {}
    showing: threading.Thread | None = None
    for line in log:
        event: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # a library's line
            event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "worker.listening" and sys.stderr.isatty():
            showing = threading.Thread(target=_show_start, args=(event["port"], headers))
            showing.start()
        if event.get("event") == "worker.ready":
            if showing is not None:
                showing.join()
            return dict(event)
        if event.get("event") == "worker.failed":
            failure = event
    raise rebuild_error(failure, WorkerError)


def _show_start(port: int, headers: dict[str, str]) -> None:
    """Show the progress of the worker's download, conversion and load until it is ready or gone."""
    line = LiveLine(sys.stderr)
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.Client(headers=headers, timeout=None, trust_env=False, verify=False) as client,
        client.stream("GET", f"http://127.0.0.1:{port}/v1/loading/progress") as stream,
    ):
        for text in stream.iter_lines():
            if text.startswith("data: {"):
                fields = json.loads(text.removeprefix("data: "))
                fields.pop("type")
                line.show(Progress(**fields))
    line.clear()
