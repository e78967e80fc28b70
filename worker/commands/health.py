"""`llorch-cpu health`: asks the running worker whether it is well, as a container's check does.

Its address comes from the same settings as a start's, and in a container, whose first process is
the worker, also from that process's flags. Runs on the main thread of a command process.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
from pathlib import Path

from worker.errors import ConfigError, NotReady
from worker.settings import Settings

_FIRST_PROCESS = Path("/proc/1/cmdline")
_SECONDS = 4.0


def run(settings: Settings, *, as_json: bool) -> int:
    """Print the worker's status.

    Raises:
        ConfigError: the settings name no port.
        NotReady: the worker does not answer, or says that it is not well.
    """
    if not settings.port:
        raise ConfigError("--port is 0, so the worker's port is not known here.", field="port")
    host = reachable(settings.host[0])
    try:
        status, text = _ask(host, settings)
    except (OSError, http.client.HTTPException) as error:
        where = f"{host}, port {settings.port}"
        raise NotReady(f"The worker at {where} does not answer: {error}.") from error
    if status != http.client.OK:
        raise NotReady(f"The worker is not well: {text}")
    print(text if as_json else json.loads(text)["status"], flush=True)
    return 0


def flags_of_first_process(command: str) -> list[str]:
    """The flags with which process 1 was started as the worker, or starts it (as `docker run
    --init` has it); none where it is something else, and the variables are the container's anyway.
    """
    try:
        line = _FIRST_PROCESS.read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:  # no such file on this system, or a process of somebody else
        return []
    names = [Path(each).name for each in line]
    return line[names.index(command) + 1 :] if command in names else []


def reachable(host: str) -> str:
    """The address itself, or the loopback address where a worker listens on all."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _ask(host: str, settings: Settings) -> tuple[int, str]:
    if settings.certificate is None:
        connection = http.client.HTTPConnection(host, settings.port, timeout=_SECONDS)
    else:
        # The certificate is for the names that clients use, and nothing secret is sent.
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            host, settings.port, timeout=_SECONDS, context=unchecked
        )
    try:
        connection.request("GET", f"{settings.api_prefix}/health")
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()
