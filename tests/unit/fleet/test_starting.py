"""`llorch-ray` with a Ray that is slow, refuses or exits: retries and messages."""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import httpx
import pytest

from worker.errors import ConfigError, ModelError, WorkerError
from worker.fleet import cluster, command, deploy
from worker.fleet.cluster import Cluster, LocalNode, NoCluster
from worker.fleet.settings import Fleet

FLEET = Fleet.model_validate({"workers": [{"name": "tiny"}]})
Dashboard = Callable[..., tuple[Cluster, list[str]]]


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Dashboard:
    """Make a client of a dashboard that answers with these statuses in turn, then with 200."""

    def answering(*statuses: int) -> tuple[Cluster, list[str]]:
        left, methods = list(statuses), []

        def answer(request: httpx.Request) -> httpx.Response:
            methods.append(request.method)
            status = left.pop(0) if left else 200
            return httpx.Response(status, text="busy" if status != 200 else '{"applications": {}}')

        client = partial(httpx.Client, transport=httpx.MockTransport(answer))
        monkeypatch.setattr(httpx, "Client", client)
        return Cluster({cluster.ADDRESS_VARIABLE: "http://head:8265"}), methods

    return answering


def test_a_deployment_that_ray_fails_is_repeated(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds, wait=time.sleep: wait(seconds / 50))
    client, methods = dashboard(503, 500)
    client.deploy({})
    assert methods == ["PUT"] * 3


def test_a_refusal_of_ray_is_reported_at_once(dashboard: Dashboard) -> None:
    client, methods = dashboard(400)
    with pytest.raises(WorkerError, match="Ray refuses: busy"):
        client.deploy({})
    assert methods == ["PUT"]


class Node:
    """Replaces `LocalNode`: it ends at once, a number of times."""

    starts = 0
    pid: int | None = None

    def __init__(self, n_ends: int, log: Path) -> None:
        self.n_ends, self.log = n_ends, log

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start(self, resources: str) -> None:
        self.starts += 1
        self.pid = None if self.starts <= self.n_ends else 1


class Started:
    """Replaces `Cluster`: it answers once the node runs."""

    is_named = False

    def __init__(self, node: Node) -> None:
        self.node = node

    def details(self) -> dict[str, object]:
        if self.node.pid is None:
            raise NoCluster("nobody there")
        return {}


def test_a_ray_that_exits_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "ray.log"
    log.write_text("the port is taken")
    node = Node(1, log)
    monkeypatch.setattr(command, "LocalNode", lambda: node)
    assert command._cluster_details(Started(node), FLEET) == {}  # type: ignore[arg-type]
    assert node.starts == 2
    node = Node(100, log)
    with pytest.raises(WorkerError, match="the port is taken"):
        command._cluster_details(Started(node), FLEET)  # type: ignore[arg-type]
    assert node.starts == command.START_ATTEMPTS


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """A fake Ray command that only records its starts; yields a function that counts them."""
    package = tmp_path / "ray" / "scripts"
    package.mkdir(parents=True)
    log = tmp_path / "starts"
    text = f"import time\nopen({str(log)!r}, 'a').write('x')\ntime.sleep(300)"
    (package / "scripts.py").write_text(text)
    (package.parent / "__init__.py").touch()  # it precedes an installed Ray
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: len(log.read_text()) if log.exists() else 0


def test_a_ray_is_found_right_after_its_start(
    starts: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux shows a process's environment only shortly after its start."""
    node = LocalNode()
    with monkeypatch.context() as patch:
        patch.setattr(LocalNode, "_is_marked", lambda *_: False)
        with node.locked():
            node.start("{}")
        assert node.pid is not None
    assert node.stop() and node.pid is None


def test_of_two_commands_at_once_one_starts_ray(
    starts: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody_there = threading.Barrier(2)
    nodes = [LocalNode(), LocalNode()]
    monkeypatch.setattr(command, "LocalNode", iter(nodes).__next__)

    class Starting:
        is_named = False
        is_asked = False

        def details(self) -> dict[str, object]:
            if not self.is_asked:
                self.is_asked = True
                nobody_there.wait(10)
            if not starts():
                raise NoCluster("nobody there")
            return {}

    try:
        with ThreadPoolExecutor() as pool:
            ups = [pool.submit(command._cluster_details, Starting(), FLEET) for _ in range(2)]  # type: ignore[arg-type]
            assert [each.result(60) for each in ups] == [{}, {}]
        assert starts() == 1
    finally:
        for node in nodes:
            node.stop()


class Serving:
    """Replaces `Cluster`: the group of this configuration is in these states in turn."""

    def __init__(self, config: deploy.Config, left: list[str]) -> None:
        self.left, self.deployed = left, list[deploy.Config]()
        self._group, self._gateway = config["applications"]

    def deploy(self, config: deploy.Config) -> None:
        self.deployed.append(config)

    def details(self) -> dict[str, object]:
        status = self.left.pop(0)
        state = "RUNNING" if status == "RUNNING" else "STARTING"
        replica = {"replica_id": "a", "state": state, "node_ip": None}
        of_group = {"worker": {"target_num_replicas": 1, "replicas": [replica]}}
        group = {"status": status, "deployed_app_config": self._group, "deployments": of_group}
        gateway = {"status": "RUNNING", "deployed_app_config": self._gateway, "deployments": {}}
        return {"applications": {"tiny": group, "gateway": gateway}}


@pytest.mark.parametrize("device", [None, "card"])
def test_only_a_group_that_needs_a_device_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """Groups that the file no longer has make room for it; if it only starts slowly, they stay."""
    monkeypatch.setattr(command, "PLACING_SECONDS", 0.0)
    monkeypatch.setattr(command, "POLL_SECONDS", 0.001)
    fleet = Fleet.model_validate({"workers": [{"name": "tiny", "device": device}]})
    config = deploy.configuration(fleet)
    starting = Serving(config, ["DEPLOYING"] * 9 + ["DEPLOY_FAILED"])
    if device is None:
        with pytest.raises(ModelError, match="tiny does not start"):
            command._deploy(starting, config, unless_for_a_device=True)  # type: ignore[arg-type]
    else:
        command._deploy(starting, config, unless_for_a_device=True)  # type: ignore[arg-type]
        assert starting.left


def test_a_command_ends_when_the_gateways_list_the_workers_it_has_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "POLL_SECONDS", 0.001)
    config = deploy.configuration(FLEET)
    serving = Serving(config, ["DEPLOYING", "RUNNING", "RUNNING"])
    command._deploy(serving, config)  # type: ignore[arg-type]
    first, second = (each["applications"][1]["deployments"][0] for each in serving.deployed)
    assert "listed" not in first["user_config"]
    assert second == {**first, "user_config": {**first["user_config"], "listed": ["tiny-a"]}}


def test_a_command_reports_that_another_one_has_won(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_SECONDS", 0.001)
    config = deploy.configuration(FLEET)
    others = Fleet.model_validate({"workers": [{"name": "tiny", "settings": {"slots": 3}}]})
    serving = Serving(deploy.configuration(others), ["RUNNING"])
    with pytest.raises(WorkerError, match="Another command has changed the fleet"):
        command._deploy(serving, config)  # type: ignore[arg-type]


def test_messages_of_ray_keep_their_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def down(*arguments: object) -> None:
        raise WorkerError("Ray refuses: Traceback\n  in serve\nValueError: \x1b[31mred")

    monkeypatch.setattr(command, "require_ray", lambda: None)
    monkeypatch.setattr(command, "_down", down)
    assert command.run(["down"]) == 1
    lines = ["llorch-ray: Ray refuses: Traceback", "      in serve", "    ValueError: \\x1b[31mred"]
    assert capsys.readouterr().err.splitlines() == lines


def test_down_does_not_stop_a_local_cluster_if_another_is_named(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = tmp_path / "llorch-worker" / "fleet"
    here.mkdir(parents=True)
    environment = {**os.environ, cluster._MARK: str(here / "ray.pid")}
    client, methods = dashboard()
    with subprocess.Popen(["sleep", "300"], env=environment) as process:
        (here / "ray.pid").write_text(str(process.pid))
        command._down(client, argparse.Namespace())
        assert process.poll() is None
        client.is_named = False
        command._down(client, argparse.Namespace())
        assert process.wait(10) != 0
    assert methods == ["GET", "GET"]


@pytest.mark.parametrize(
    "address", ["head:8265", "127.0.0.1:8265", "http://", "http://head:port", "ray://h"]
)
def test_an_address_that_is_not_a_url_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match="RAY_DASHBOARD_ADDRESS is .* must be a URL"):
        Cluster({cluster.ADDRESS_VARIABLE: address})


def test_another_server_at_the_address_is_not_a_cluster(dashboard: Dashboard) -> None:
    client, _ = dashboard(201)
    with pytest.raises(WorkerError, match="is not a Ray cluster"):
        client.details()


def test_applications_of_others_are_left_alone() -> None:
    foreign = {"status": "RUNNING", "deployed_app_config": {"import_path": "shop:app"}}
    by_hand = {"status": "RUNNING", "deployed_app_config": None}
    for app in (foreign, by_hand):
        with pytest.raises(ConfigError, match="also serves shop"):
            deploy.running_config({"applications": {"shop": app}})
    leaving = {"status": "DELETING", "deployed_app_config": None}
    assert deploy.running_config({"applications": {"tiny": leaving}}) is None
