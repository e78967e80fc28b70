"""The fleet's file: what it may say, and the sentence for what it may not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.errors import ConfigError
from worker.fleet.autoscaling import REQUESTS, RequestsPerWorker
from worker.fleet.deploy import configuration, rolled, scaled
from worker.fleet.settings import Fleet, load

WORKERS = '[[workers]]\nname = "tiny"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    text = """
host = "0.0.0.0"
port = 9000
gateways = 2

[[workers]]
name = "small"
model = "model.gguf"
replicas = 3
device = "llorch_device"

[workers.settings]
slots = 4
page = false
drain_timeout = 5
allow_host = ["a.example", "b.example"]

[[workers]]
name = "large"
backend = "cuda"
model = "hf:owner/repo@main::file=model.gguf"
"""
    fleet = load(written(tmp_path, text))
    small, large = fleet.workers
    assert small.model == str(tmp_path / "model.gguf")
    assert small.arguments() == [
        "--slots", "4", "--no-page", "--drain-timeout", "5", "--allow-host", "a.example",
        "--allow-host", "b.example", "--model", str(tmp_path / "model.gguf"),
    ]  # fmt: skip
    assert small.resources == {"num_cpus": 0, "resources": {"llorch_device": 1}}
    assert small.drain_seconds == 5
    assert large.model == "hf:owner/repo@main::file=model.gguf"
    assert large.resources == {"num_cpus": 0, "num_gpus": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "workers: it is missing"),
        ("workers = [", "is not valid TOML"),
        ("workers = []", "workers: list should have at least 1 item"),
        (WORKERS + "replica = 2", "workers[0].replica is not a field; did you mean replicas?"),
        (WORKERS + "replicas = 0", "workers[0].replicas"),
        (WORKERS + 'backend = "gpu"', "workers[0].backend: it must be one of 'cpu', 'cuda'"),
        (WORKERS + "replicas = [3, 1]", "workers[0].replicas: it is a whole number from"),
        (WORKERS + "replicas = [1, 2, 3]", "or the least and the most, as [1, 3]"),
        (WORKERS + "replicas = [0, 3]", "workers[0].replicas"),
        (WORKERS + "[workers.scaling]\ntarget = 2", "workers[0]: scaling needs replicas with the"),
        (WORKERS + "replicas = [1, 3]\n[workers.scaling]\ntargets = 2", "did you mean target?"),
        (WORKERS + "replicas = [1, 3]\n[workers.scaling]\nup_delay = -1", "scaling.up_delay: it"),
        (WORKERS + "[workers.settings]\nslot = 1", "slot is not a setting of a worker; did you"),
        (WORKERS + "[workers.settings]\nslots = 0", "--slots is 0; it must be at least 1"),
        (WORKERS + "[workers.settings]\nport = 1", "port is not for the file: the fleet sets it"),
        (WORKERS + '[workers.settings]\nworker_token = "x"', "worker_token is a secret"),
        (WORKERS + WORKERS, "'tiny' is there twice"),
        ("port = 70000\n" + WORKERS, "port: it must be at most 65535"),
        ('[[workers]]\nname = "gateway"', "'gateway' is the fleet's own"),
        ('[[workers]]\nname = "a b"', "workers[0].name"),
    ],
)
def test_a_wrong_file_is_answered_with_its_field(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(written(tmp_path, text))
    assert said in raised.value.message
    assert "fleet.toml" in raised.value.message


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(Path("nowhere.toml"))


def fleet(**fields: object) -> Fleet:
    return Fleet.model_validate({"workers": [{"name": "tiny", **fields}]})


def test_another_number_of_workers_rolls_nobody() -> None:
    """Serve rolls an application whose import path, environment or arguments differ."""
    before = configuration(fleet(replicas=1), {})
    after = configuration(fleet(replicas=3), {}, before)
    for old, new in zip(before["applications"], after["applications"], strict=True):
        for name in ("import_path", "args", "runtime_env"):
            assert old.get(name) == new.get(name)


def scaling(**fields: object) -> Fleet:
    return fleet(replicas=[1, 3], settings={"slots": 5}, **fields)


def test_the_load_decides_between_the_least_and_the_most() -> None:
    def deployment(fleet: Fleet) -> dict[str, Any]:
        (found,) = configuration(fleet, {})["applications"][0]["deployments"]
        return dict(found)

    given = scaling(scaling={"target": 7, "up_delay": 1, "down_delay": 20}, surge=True)
    found = deployment(given)
    assert "num_replicas" not in found and found["max_surge_percent"] == 1
    config = found["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"]) == (1, 3)
    assert (config["upscale_delay_s"], config["downscale_delay_s"]) == (1, 20)
    assert config["policy"]["policy_kwargs"] == {"target": 7}
    assert given.workers[0].max_workers == 4
    default = deployment(scaling())
    assert default["max_surge_percent"] == 0
    assert default["autoscaling_config"]["policy"]["policy_kwargs"] == {"target": 4}
    # What says how many there are rolls nobody.
    args = [configuration(each, {})["applications"][0]["args"] for each in (given, scaling())]
    assert (
        args[0]
        == args[1]
        == configuration(fleet(settings={"slots": 5}), {})["applications"][0]["args"]
    )


def test_the_policy_counts_what_all_workers_report() -> None:
    policy = RequestsPerWorker(target=4)

    def wanted(reported: dict[str, float]) -> float:
        told = {REQUESTS: reported} if reported else {}
        return policy(SimpleNamespace(aggregated_metrics=told, target_num_replicas=2))[0]

    assert wanted({"a": 8, "b": 4}) == 3
    assert wanted({"a": 0, "b": 0}) == 0
    assert wanted({}) == 2


def test_a_roll_and_a_failed_start_differ_from_what_was() -> None:
    before = configuration(fleet(), {})
    again = rolled(before, "tiny")
    assert again["applications"][0]["args"]["generation"] == 1
    assert again["applications"][1] == before["applications"][1]
    assert configuration(fleet(), {}, again)["applications"][0]["args"]["generation"] == 1
    retried = configuration(fleet(), {}, again, failed=["tiny"])
    assert retried["applications"][0]["args"]["generation"] == 2


def test_scale_says_a_number() -> None:
    before = configuration(fleet(replicas=3), {})
    after = scaled(before, "tiny", 2)
    (deployment,) = after["applications"][0]["deployments"]
    assert deployment["num_replicas"] == 2
    (deployment,) = scaled(configuration(scaling(), {}), "tiny", 2)["applications"][0][
        "deployments"
    ]
    assert deployment["num_replicas"] == 2 and "autoscaling_config" not in deployment
    with pytest.raises(ConfigError, match="no workers named 'big'; it has tiny"):
        scaled(before, "big", 2)


def test_only_secrets_of_the_environment_go_to_the_workers() -> None:
    given = {"LLORCH_WORKER_TOKEN": "secret", "PATH": "/bin"}
    environment = configuration(fleet(), given)["applications"][0]["runtime_env"]
    assert environment == {"env_vars": {"LLORCH_WORKER_TOKEN": "secret"}}
