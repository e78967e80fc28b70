"""`llorch-cpu health`: asks the running worker whether it is well, as a container's check does.

Its address comes from the same settings as a start's. In a container, whose first process is the
worker, it comes from that process's own flags. Runs on the main thread of a command process.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
from pathlib import Path

from worker.errors import ConfigError, NotReady
from worker.flags import parse_flags
from worker.settings import Settings

_FIRST_PROCESS = Path("/proc/1/cmdline")
_SECONDS = 4.0


def run(settings: Settings, *, as_json: bool) -> int:
    """Print the worker's status.

    Raises:
        ConfigError: the settings name no port.
        NotReady: the worker does not answer, or says that it is not well.
    """
    served = of_first_process(settings)
    if not served.port:
        raise ConfigError("--port is 0, so the worker's port is not known here.", field="port")
    host = reachable(served.host)
    try:
        status, text = _ask(host, served)
    except (OSError, http.client.HTTPException) as error:
        where = f"{host}, port {served.port}"
        raise NotReady(f"The worker at {where} does not answer: {error}.") from error
    if status != http.client.OK:
        raise NotReady(f"The worker is not well: {text}")
    print(text if as_json else json.loads(text)["status"], flush=True)
    return 0


def of_first_process(settings: Settings) -> Settings:
    """The settings of a worker that is process 1, or that process 1 has started; else `settings`.

    Both have the variables of the container, so only the flags are looked up.
    """
    try:
        line = _FIRST_PROCESS.read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:  # no such file on this system, or a process of somebody else
        return settings
    names = [Path(each).name for each in line]
    command = f"llorch-{settings.backend}"
    if command not in names:
        return settings
    flags = line[names.index(command) + 1 :]
    return Settings.load(settings.backend, parse_flags(settings.backend, flags))


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
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    finally:
        connection.close()
