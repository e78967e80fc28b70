"""curl, as a person types it: the events are there as they happen, and the stream ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.scripted_api import ScriptedFactory, story
from tests.support.worker import WorkerProcess

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")


@contextmanager
def curl(url: str, body: object, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """`curl -N` with a JSON body; its output is a pipe that is read as it fills."""
    assert CURL
    command = [CURL, "--silent", "--show-error", "--fail-with-body", "-N", *flags]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


def arrivals(process: subprocess.Popen[bytes]) -> tuple[bytes, list[float]]:
    """The whole output, and when each part of it could be read, in seconds from the first."""
    assert process.stdout
    output, times = b"", []
    while part := os.read(process.stdout.fileno(), 65536):
        output += part
        times.append(time.monotonic())
    return output, [moment - times[0] for moment in times]


NDJSON = ("-H", "Accept: application/x-ndjson")


@pytest.mark.parametrize(
    ("path", "flags"), [("/execute", ()), ("/v1/inference/stream", ()), ("/v1/inference", NDJSON)]
)
def test_each_event_is_there_when_it_happens(
    scripted: ScriptedFactory, path: str, flags: tuple[str, ...]
) -> None:
    """Frames 0.2 s apart arrive 0.2 s apart: nothing on the way collects them."""
    worker = scripted()
    worker.supervisor.script = [part for frame in story(*"abcd") for part in (frame, 0.2)]
    with curl(worker.base_url + path, {"job_id": "a", "prompt": "Once"}, *flags) as process:
        output, times = arrivals(process)
    assert process.returncode == 0
    assert output.count(b'"type":"token"') == 4
    assert len(times) >= 4 and times[-1] >= 0.5, times


def test_a_curl_that_is_stopped_frees_its_sequence(worker: WorkerProcess) -> None:
    cancelled = 'worker_requests_total{outcome="cancelled"}'
    before = worker.metric(cancelled)
    body = {"job_id": "curl-2", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}
    with curl(f"{worker.base_url}/execute", body) as process:
        assert process.stdout and os.read(process.stdout.fileno(), 1)
        process.terminate()
        worker.wait_idle()
    assert worker.metric(cancelled) == before + 1
    worker.wait_for_free_cells()
