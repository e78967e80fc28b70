"""The fleet's file: valid settings, and the messages for invalid ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.errors import ConfigError
from worker.flags import parse_flags
from worker.fleet import command
from worker.fleet.autoscaling import REQUESTS, RequestsPerWorker
from worker.fleet.deploy import configuration, key_files_of, rolled, scaled, with_leaving
from worker.fleet.settings import Fleet, load
from worker.settings import Settings

LEAST = {"workers": [{"name": "tiny"}]}
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
chat_template_kwargs = { enable_thinking = false }

[[workers]]
name = "large"
backend = "cuda"
model = "hf:owner/repo@main::file=model.gguf"
"""
    fleet = load(written(tmp_path, text))
    small, large = fleet.workers
    assert small.model == str(tmp_path / "model.gguf")
    assert small.arguments() == [
        "--slots=4", "--no-page", "--drain-timeout=5.0", "--allow-host=a.example",
        "--allow-host=b.example", '--chat-template-kwargs={"enable_thinking": false}',
        "--served-model-name=small", f"--model={tmp_path}/model.gguf",
    ]  # fmt: skip
    assert small.resources == {"num_cpus": 0, "resources": {"llorch_device": 1}}
    assert small.worker.drain_timeout == 5
    assert large.model == "hf:owner/repo@main::file=model.gguf"
    assert large.resources == {"num_cpus": 0, "num_gpus": 1}


@pytest.mark.parametrize(
    ("chosen", "reserved", "expected"),
    [
        (None, ["3"], "3"),
        ("0,1", ["3", "5"], "3,5"),
        ("1,0", ["3", "5"], "5,3"),
    ],
)
def test_a_workers_gpus_are_among_those_that_ray_has_reserved_for_it(
    chosen: str | None, reserved: list[str], expected: str
) -> None:
    """Ray hides the others from CUDA's driver, but Vulkan's shows all."""
    for backend in ("cuda", "vulkan"):
        settings = {} if chosen is None else {f"{backend}_device": chosen}
        [group] = fleet(backend=backend, settings=settings).workers
        assert group.resources == {"num_cpus": 0, "num_gpus": len(reserved)}
        with_ray, alone = group.arguments(reserved), group.arguments()
        if backend == "vulkan":
            assert [each for each in with_ray if "--vulkan-device" in each] == [
                f"--vulkan-device={expected}"
            ]
        else:
            assert with_ray == alone


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "workers: it is missing"),
        ("workers = [", "is not valid TOML"),
        ("workers = []", "workers: it must be a list of at least 1 item"),
        (WORKERS + "replica = 2", "workers[0].replica is not a field; did you mean replicas?"),
        (WORKERS + "replicas = 0", "workers[0].replicas"),
        (WORKERS + 'backend = "gpu"', "workers[0].backend: it must be one of 'cpu', 'cuda'"),
        (WORKERS + "replicas = [3, 1]", "workers[0].replicas: it must be a whole number from"),
        (WORKERS + "replicas = [1, 2, 3]", "or a minimum and maximum: [1, 3]"),
        (WORKERS + "replicas = [0, 3]", "workers[0].replicas"),
        (
            WORKERS + "[workers.scaling]\ntarget = 2",
            "workers[0]: scaling needs replicas with a minimum",
        ),
        (WORKERS + "replicas = [1, 3]\n[workers.scaling]\ntargets = 2", "did you mean target?"),
        (WORKERS + "replicas = [1, 3]\n[workers.scaling]\nup_delay = -1", "scaling.up_delay: it"),
        (WORKERS + "[workers.settings]\nslot = 1", "slot is not a setting of a worker; did you"),
        (WORKERS + "[workers.settings]\nzork = 1", "of a worker; llorch-cpu --help lists them"),
        (WORKERS + "[workers.settings]\nslots = 0", "--slots is 0; it must be at least 1"),
        (WORKERS + "[workers.settings]\nport = 1", "port is not a worker's setting here"),
        (
            WORKERS + '[workers.settings]\nssl_certfile = "/a"\nssl_keyfile = "/b"',
            "put it above `settings`",
        ),
        (
            WORKERS + '[workers.settings]\nuds = "/a"',
            "uds cannot be set in the file: the fleet chooses it",
        ),
        (WORKERS + '[workers.settings]\nworker_token = "x"', "worker_token is a secret"),
        (WORKERS + WORKERS, "'tiny' is given twice"),
        (
            WORKERS
            + WORKERS.replace("tiny", "a")
            + '[workers.settings]\nserved_model_name = "tiny"',
            "'tiny' is given twice",
        ),
        ("port = 70000\n" + WORKERS, "port: it must be at most 65535"),
        ("port = true\n" + WORKERS, "port: it must be a whole number"),
        ('gateways = "2"\n' + WORKERS, "gateways: it must be a whole number"),
        (WORKERS + "replicas = [true, 3]", "workers[0].replicas: it must be a whole number from"),
        (WORKERS + 'model = ""', "workers[0].model: it must be a text of at least 1 character"),
        (WORKERS + f'model = "./{"a" * 300}"', "workers[0].model: there is no file"),
        (WORKERS + "settings.lora = 3", "--lora is 3; it must be a list"),
        (WORKERS + "settings.lora = {a = 1}", "--lora is {'a': 1}; it must be a list"),
        (WORKERS + "settings.slots = true", "slots is true; it is not a switch"),
        (WORKERS + "settings.cuda_device = 1", "cuda_device applies to llorch-cuda only"),
        (WORKERS + "settings.slots = 2024-01-01", "--slots is datetime.date(2024, 1, 1); it must"),
        (f"x = {'[' * 3000}{']' * 3000}\n", "nests its brackets too deeply"),
        ('[[workers]]\nname = "gateway"', "'gateway' is reserved"),
        ('[[workers]]\nname = "a/b"', "workers[0].name: it must be up to 100 letters, "),
        ('ssl_certfile = "/a"\n' + WORKERS, "ssl_certfile and ssl_keyfile go together"),
        ('token_file = "no"\n' + WORKERS, "token_file: there is no file"),
        ('token_file = "."\n' + WORKERS, "is a folder, but a file is needed"),
        ('api_key_file = "/"\n' + WORKERS, "api_key_file: / is a folder, but a file"),
        ('token_file = "/dev/zero"\n' + WORKERS, "/dev/zero is a device or a pipe, but a file"),
        (WORKERS + 'settings.chat_template = "."', "workers[0].settings.chat_template: "),
        ('host = "http://0.0.0.0"\n' + WORKERS, "host: it must be a host name or an address"),
        ('host = "0.0.0.0:8000"\n' + WORKERS, "host: it must be a host name or an address"),
    ],
)
def test_an_invalid_file_is_refused_with_its_field(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(written(tmp_path, text))
    assert words in raised.value.message
    assert "fleet.toml" in raised.value.message


@pytest.mark.parametrize(
    "settings",
    [
        {"page": "false", "strict": 1, "slots": 2.0, "served_model_name": "-a,--help"},
        {"frequency_penalty": -1e-05, "repeat_last_n": -1, "reasoning_budget_message": "-x"},
        {"samplers": ["top_k", "temperature"]},
        {"samplers": ""},
        {"control_vector": ["/a", "/b"], "control_vector_layer_range": [1, 9]},
        {"chat_template_kwargs": {"a": [1, "-"]}, "allow_media_host": "a.example,b.example"},
    ],
)
def test_a_worker_gets_the_settings_of_the_file(settings: dict[str, Any]) -> None:
    [group] = fleet(settings=settings).workers
    passed = Settings.load(group.backend, parse_flags(group.backend, group.arguments()))
    meant = Settings.load(group.backend, {**settings, "worker_id": passed.worker_id})
    names = {"served_model_name"} - settings.keys()
    assert passed.model_dump(exclude=names) == meant.model_dump(exclude=names)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(Path("nowhere.toml"))


def fleet(**fields: object) -> Fleet:
    return Fleet.model_validate({"workers": [{"name": "tiny", **fields}]})


def test_another_number_of_workers_restarts_no_application() -> None:
    """Serve rolls an application if its import path, environment or arguments change."""
    before = configuration(fleet(replicas=1))
    after = configuration(fleet(replicas=3), before)
    for old, new in zip(before["applications"], after["applications"], strict=True):
        for name in ("import_path", "args"):
            assert old.get(name) == new.get(name)


def scaling(**fields: object) -> Fleet:
    return fleet(replicas=[1, 3], settings={"slots": 5}, **fields)


def test_the_load_decides_between_the_minimum_and_the_maximum() -> None:
    def deployment(fleet: Fleet) -> dict[str, Any]:
        (found,) = configuration(fleet)["applications"][0]["deployments"]
        return dict(found)

    scaled = scaling(scaling={"target": 7, "up_delay": 1, "down_delay": 20}, surge=True)
    found = deployment(scaled)
    assert "num_replicas" not in found and found["max_surge_percent"] == 1
    config = found["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"]) == (1, 3)
    assert (config["upscale_delay_s"], config["downscale_delay_s"]) == (1, 20)
    assert config["policy"]["policy_kwargs"] == {"target": 7}
    assert scaled.workers[0].max_workers == 4
    default = deployment(scaling())
    assert default["max_surge_percent"] == 0
    assert default["autoscaling_config"]["policy"]["policy_kwargs"] == {"target": 4}
    # Changing the number of workers rolls nobody.
    args = [configuration(each)["applications"][0]["args"] for each in (scaled, scaling())]
    assert (
        args[0] == args[1] == configuration(fleet(settings={"slots": 5}))["applications"][0]["args"]
    )


def test_the_policy_counts_what_all_workers_report() -> None:
    policy = RequestsPerWorker(target=4)

    def wanted(reported: dict[str, float]) -> float:
        metrics = {REQUESTS: reported} if reported else {}
        return policy(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2))[0]

    assert wanted({"a": 8, "b": 4}) == 3
    assert wanted({"a": 0, "b": 0}) == 0
    assert wanted({}) == 2


def test_a_roll_and_a_failed_start_increase_the_generation() -> None:
    before = configuration(fleet())
    again = rolled(before, "tiny")
    assert again["applications"][0]["args"]["generation"] == 1
    assert again["applications"][1] == before["applications"][1]
    assert configuration(fleet(), again)["applications"][0]["args"]["generation"] == 1
    retried = configuration(fleet(), again, failed=["tiny"])
    assert retried["applications"][0]["args"]["generation"] == 2


def test_an_empty_name_of_a_group_is_refused() -> None:
    """As from an unset shell variable: it does not mean the first of several."""
    config = configuration(fleet())
    with pytest.raises(ConfigError, match="no workers named ''"):
        rolled(config, command._group(config, argparse.Namespace(group="")))
    assert command._group(config, argparse.Namespace(group=None)) == "tiny"


def test_scaling_sets_the_number_of_workers() -> None:
    before = configuration(fleet(replicas=3))
    after = scaled(before, "tiny", 2)
    (deployment,) = after["applications"][0]["deployments"]
    assert deployment["num_replicas"] == 2
    (deployment,) = scaled(configuration(scaling()), "tiny", 2)["applications"][0]["deployments"]
    assert deployment["num_replicas"] == 2 and "autoscaling_config" not in deployment
    with pytest.raises(ConfigError, match="no workers named 'big'; it has tiny"):
        scaled(before, "big", 2)


def test_a_file_that_leaves_groups_out_keeps_them_until_the_others_serve() -> None:
    def of(*names: str) -> Fleet:
        return Fleet.model_validate({"workers": [{"name": name} for name in names]})

    before = configuration(of("old", "stays"))
    after = configuration(of("stays", "new"), before)
    both = with_leaving(after, before)
    assert both is not None
    assert [app["name"] for app in both["applications"]] == ["stays", "new", "old", "gateway"]
    assert both["applications"][2] == before["applications"][0]
    served = both["applications"][3]["deployments"][0]["user_config"]["workers"]
    assert [group["name"] for group in served] == ["old", "stays", "new"]
    assert [app["name"] for app in after["applications"]] == ["stays", "new", "gateway"]
    assert with_leaving(after, after) is None and with_leaving(after, None) is None
    assert with_leaving(after, before, failed=["old"]) is None


def test_relative_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    """Whatever folder Ray starts in."""
    for name in ("a.gguf", "draft.gguf", "lora.gguf", "chat.jinja", "key.pem", "token"):
        (tmp_path / name).touch()
    text = """
ssl_certfile = "key.pem"
ssl_keyfile = "key.pem"
token_file = "token"

[[workers]]
name = "tiny"
model = "a.gguf"

[workers.settings]
draft = "draft.gguf"
lora = "lora.gguf=0.5"
chat_template = "chat.jinja"
kv_store = "made/later"
cache_dir = "/absolute"
"""
    found = load(written(tmp_path, text))
    (group,) = found.workers
    assert group.model == str(tmp_path / "a.gguf")
    assert group.settings == {
        "draft": str(tmp_path / "draft.gguf"),
        "lora": [f"{tmp_path}/lora.gguf:0.5"],
        "chat_template": str(tmp_path / "chat.jinja"),
        "kv_store": str(tmp_path / "made/later"),
        "cache_dir": "/absolute",
    }
    assert (found.ssl_certfile, found.token_file) == (f"{tmp_path}/key.pem", f"{tmp_path}/token")
    assert found.uri == "https://127.0.0.1:8000"


@pytest.mark.parametrize("name", ["model", "draft", "lora", "chat_template", "models_file"])
def test_a_relative_path_that_does_not_exist_is_refused(tmp_path: Path, name: str) -> None:
    place = "" if name == "model" else "settings."
    text = WORKERS + f'{place}{name} = "./nothing.gguf"'
    with pytest.raises(ConfigError) as raised:
        load(written(tmp_path, text))
    words = f"workers[0].{place}{name}: there is no file {tmp_path}/nothing.gguf"
    assert words in raised.value.message


@pytest.mark.parametrize(
    ("setting", "value", "made"),
    [
        ("lora", "v=1.gguf:0.123456789", "v={}/1.gguf:0.123456789"),
        ("control_vector", "v=1.gguf:0.123456789", "{}/v=1.gguf:0.123456789"),
        ("control_vector", "v=1", "{}/v=1:1"),
    ],
)
def test_the_path_within_a_setting_is_made_absolute(
    tmp_path: Path, setting: str, value: str, made: str
) -> None:
    for name in ("1.gguf", "v=1.gguf", "v=1", "v"):
        (tmp_path / name).touch()
    (group,) = load(written(tmp_path, WORKERS + f'settings.{setting} = ["{value}"]')).workers
    assert group.settings[setting] == [made.format(tmp_path)]


def test_the_adapters_of_a_group_are_names_of_its_models(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    lora = '["sql=./a.gguf:0.5", "/elsewhere/law.gguf", "law2=/else=where.gguf"]'
    (group,) = load(written(tmp_path, WORKERS + f"settings.lora = {lora}")).workers
    assert group.names == (group.name, "sql", "law", "law2")
    line = group.arguments()
    assert line == [
        f"--lora=sql={tmp_path}/a.gguf:0.5",
        "--lora=/elsewhere/law.gguf:1",
        "--lora=law2=/else=where.gguf:1",
        f"--served-model-name={group.name}",
    ]
    with pytest.raises(ConfigError, match="NAME="):
        load(written(tmp_path, WORKERS + 'settings.lora = ["sql="]'))


def test_a_running_fleet_keeps_its_token() -> None:
    files = {"token_file": "/run/token", "api_key_file": "/run/keys"}
    protected = configuration(Fleet.model_validate({**LEAST, **files}))
    assert key_files_of(protected) == files
    open_fleet = Fleet.model_validate(LEAST)
    kept = command._protected(open_fleet, protected)
    assert (kept.token_file, kept.api_key_file) == ("/run/token", "/run/keys")
    assert key_files_of(configuration(open_fleet)) == key_files_of(None) == {}


def test_no_secret_is_in_the_configuration_for_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LLORCH_WORKER_TOKEN", "very secret")
    fleet = command._protected(Fleet.model_validate(LEAST), None)
    assert fleet.token_file is not None
    file = Path(fleet.token_file)
    assert file.read_text() == "very secret" and file.stat().st_mode & 0o777 == 0o600
    assert "very secret" not in json.dumps(configuration(fleet))
    monkeypatch.delenv("LLORCH_WORKER_TOKEN")
    again = command._protected(Fleet.model_validate(LEAST), configuration(fleet))
    assert again.token_file == fleet.token_file
    own = Fleet.model_validate({**LEAST, "token_file": "/etc/token"})
    assert command._protected(own, configuration(fleet)).token_file == "/etc/token"
