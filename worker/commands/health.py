"""`llorch-cpu health`: asks the running worker whether it is healthy, for a container's check.

The worker's address comes from the same settings as for a start, and in a container, where the
worker is the first process, also from that process's flags. Runs on the main thread.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from worker.commands.served import answer_of, client_of, no_worker_at
from worker.errors import ConfigError, NotReady
from worker.settings import Settings

_FIRST_PROCESS = Path("/proc/1/cmdline")
_SECONDS = 4.0


def run(settings: Settings, *, as_json: bool) -> int:
    """Print the worker's status.

    Raises:
        ConfigError: the settings name no port.
        NotReady: the worker does not answer, or reports that it is not healthy.
    """
    if not settings.port and settings.socket_path is None:
        raise ConfigError("--port is 0, so the worker's port is unknown.", field="port")
    with client_of(settings, is_probe=True) as client:
        where = settings.socket_path or client.base_url
        try:
            status, text = answer_of(client, "/health", _SECONDS)
        except (httpx.HTTPError, UnicodeError) as error:
            raise NotReady(f"The worker at {where} does not answer: {error}.") from error
    with no_worker_at(where, NotReady):
        body = json.loads(text)
        if status != httpx.codes.OK and isinstance(body, dict):
            raise NotReady(f"The worker is not healthy: {text}")
        state = body["status"]
    print(text if as_json else state, flush=True)
    return 0


def flags_of_first_process(command: str) -> list[str]:
    """The worker's flags from process 1, which is the worker or, with `docker run --init`, starts
    it; empty if it is something else. Its variables are the container's anyway."""
    try:
        line = _FIRST_PROCESS.read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:  # no /proc, or another user's process
        return []
    names = [Path(each).name for each in line]
    return line[names.index(command) + 1 :] if command in names else []
