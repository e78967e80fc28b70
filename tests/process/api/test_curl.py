"""curl, as a person types it: events arrive as they happen, and the stream ends."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.scripted_api import ScriptedFactory, story
from tests.support.worker import PATIENCE_S

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")


@contextmanager
def curl(url: str, body: object, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `curl -N` with a JSON body; its output is a pipe that is read as it fills."""
    assert CURL
    command = [CURL, "--silent", "--show-error", "--fail-with-body", "-N", *flags]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


NDJSON = ("-H", "Accept: application/x-ndjson")


@pytest.mark.parametrize(
    ("path", "flags"), [("/execute", ()), ("/v1/inference/stream", ()), ("/v1/inference", NDJSON)]
)
def test_curl_gets_each_event_when_it_happens(
    scripted: ScriptedFactory, path: str, flags: tuple[str, ...]
) -> None:
    """Nothing on the way buffers: each event comes once the previous one was read."""
    worker, frames = scripted(), story(*"abcd")
    gates = [threading.Event() for _ in frames]
    worker.supervisor.script = [part for each in zip(gates, frames, strict=True) for part in each]
    kinds = ["started", *["token"] * 4, "end"]
    with curl(worker.base_url + path, {"job_id": "a", "prompt": "Once"}, *flags) as process:
        assert process.stdout
        output = b""
        for n_events, gate in enumerate(gates, 1):
            gate.set()
            while len(types := re.findall(rb'"type":"(\w+)"', output)) < n_events:
                assert select.select([process.stdout], [], [], PATIENCE_S)[0], output
                output += os.read(process.stdout.fileno(), 65536)
            assert types == [kind.encode() for kind in kinds[:n_events]]
    assert process.returncode == 0
