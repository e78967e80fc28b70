"""The unit under a running systemd, which a privileged container boots on top of the CPU image.

`systemd-analyze verify` misses errors that only a start shows, such as a missing group.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests import ROOT
from tests.support import sse
from tests.support.worker import until
from tests.system.images.container import environment, podman

pytestmark = pytest.mark.long
UNIT = ROOT / "builds" / "deploy" / "llorch-worker@.service"
IMAGE = "localhost/llorch-systemd:test"
SERVICE = "llorch-worker@cpu"
PORT = 8123
RECIPE = """
FROM {image}
USER 0
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends curl dbus systemd
COPY {unit} /etc/systemd/system/
RUN mkdir /etc/llorch-worker && echo LLORCH_PORT={port} > /etc/llorch-worker/cpu.env
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/lib/systemd/systemd"]
"""


class Machine:
    """A booted container."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *command: str, check: bool = True) -> str:
        return podman("exec", self.name, *command, check=check)

    def show(self, field: str) -> str:
        """Return the current value of a property of the service."""
        return self.run("systemctl", "show", "--value", "--property", field, SERVICE)

    def is_ready(self) -> bool:
        url = f"http://127.0.0.1:{PORT}/ready"
        return '"ready":true' in self.run("curl", "--silent", url, check=False)

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--unit", SERVICE)[-4000:]

    def start(self) -> None:
        self.run("systemctl", "start", SERVICE)
        until(self.is_ready, self.journal)


@pytest.fixture(scope="module")
def machine(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("systemd")
    (folder / UNIT.name).write_bytes(UNIT.read_bytes())
    recipe = folder / "Containerfile"
    recipe.write_text(RECIPE.format(image=image, unit=UNIT.name, port=PORT))
    flags = ["--network=host", "--format=docker", "--layers=false", "--pull=never"]
    podman("build", *flags, f"--tag={IMAGE}", str(folder), timeout_s=900)
    options = ["--detach", "--privileged", "--systemd=always", "--no-healthcheck"]
    booted = Machine(podman("run", *options, IMAGE))
    try:
        until(
            lambda: booted.run("systemctl", "is-system-running", check=False) == "running",
            lambda: booted.run("systemctl", "list-units", "--failed", check=False),
        )
        yield booted
    finally:
        podman("rm", "--force", "--volumes", booted.name, check=False)


def test_it_starts_as_nobody_and_serves(machine: Machine) -> None:
    machine.start()
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0})
    url, kind = f"http://127.0.0.1:{PORT}/v1/inference", "Content-Type: application/json"
    answer = json.loads(machine.run("curl", "--silent", "--header", kind, "--data", body, url))
    assert answer["text"] == ", there was a"
    status = machine.run("cat", f"/proc/{machine.show('MainPID')}/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1" and "0" not in fields["Uid"].split()


def test_one_that_was_killed_is_started_again(machine: Machine) -> None:
    machine.start()
    before = machine.show("MainPID")
    machine.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", SERVICE)
    until(lambda: machine.show("MainPID") not in (before, "0"), machine.journal)
    until(machine.is_ready, machine.journal)
    assert machine.show("NRestarts") == "1"


def test_a_stop_lets_the_stream_end(machine: Machine) -> None:
    machine.start()
    body = json.dumps({"job_id": "last", "prompt": "Once", "max_tokens": 100, "ignore_eos": True})
    line = ["podman", "exec", machine.name, "curl", "--silent", "--no-buffer"]
    line += ["--header", "Content-Type: application/json", "--data", body]
    with subprocess.Popen(
        [*line, f"http://127.0.0.1:{PORT}/execute"], env=environment(), stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        head = client.stdout.read(200)
        began = time.monotonic()
        machine.run("systemctl", "stop", SERVICE)
        took = time.monotonic() - began
        stream = sse.collect([head, client.stdout.read()])
    assert stream.end["tokens_out"] == 100
    assert machine.show("ActiveState") == "inactive" and machine.show("Result") == "success"
    assert took < 40


def test_what_cannot_heal_is_not_tried_again(machine: Machine) -> None:
    settings = "/etc/llorch-worker/cpu.env"
    machine.run("sh", "-c", f"cp {settings} /tmp/kept; echo LLORCH_SLOTS=none >> {settings}")
    try:
        machine.run("systemctl", "start", SERVICE, check=False)
        until(lambda: machine.show("ActiveState") == "failed", machine.journal)
        assert (machine.show("ExecMainStatus"), machine.show("NRestarts")) == ("2", "0")
        assert "slots" in machine.journal()
    finally:
        machine.run("cp", "/tmp/kept", settings)
        machine.run("systemctl", "reset-failed", SERVICE)
