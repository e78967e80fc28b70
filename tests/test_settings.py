"""Settings: sources of values, their precedence, and the errors for wrong ones."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo

from builds import pins
from worker import cli
from worker.commands import SUBCOMMANDS, convert, install_engine
from worker.errors import ConfigError
from worker.flags import _parser, parse_flags
from worker.fleet import command
from worker.installation import own_version
from worker.setting_faults import ENV_ONLY
from worker.settings import BACKEND_FIELDS, FIELDS, Settings, is_switch
from worker.wire.backends import BACKENDS, BackendName

PROJECT = tomllib.loads((pins.FOLDER.parent / "pyproject.toml").read_text())["project"]
SCRIPTS = PROJECT["scripts"]


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("LLORCH_") or name in ("MODEL_PATH", "BIND_ADDR", "CUDA_DEVICE"):
            monkeypatch.delenv(name)


def load(*flags: str, backend: BackendName = "cpu") -> Settings:
    return Settings.load(backend, parse_flags(backend, flags))


def refusal(*flags: str, backend: BackendName = "cpu") -> str:
    with pytest.raises(ConfigError) as caught:
        load(*flags, backend=backend)
    return caught.value.message


def test_flags_win_over_variables_over_the_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('port = 1\nslots = 1\nbatch = 100\nmicro-batch = 10\nblas = "on"\n')
    monkeypatch.setenv("LLORCH_PORT", "2")
    monkeypatch.setenv("LLORCH_SLOTS", "2")
    settings = load("--config", str(config), "--port", "3")
    assert (settings.port, settings.engine.slots, settings.engine.batch) == (3, 2, 100)
    assert (settings.engine.micro_batch, settings.engine.blas) == (10, "on")
    assert settings.keepalive == 15
    monkeypatch.setenv("LLORCH_CONFIG", str(config))
    assert load().engine.micro_batch == 10


VALID = {
    "allow_origin": "https://chat.example",
    "batch": "1024",
    "callback_url": "http://manager:9200/ready",
    "heartbeat_url": "http://manager:9200/beat",
    "max_body_bytes": "1024",
    "metrics_interval_ms": "250",
    "n_gpu_layers": "0",
    "samplers": "top_k;temperature",
    "api_prefix": "/llm",
    "override_kv": "general.name=str:a,b,llama.context_length=int:64",
    "speculate": "ngram",
    "chat_template_kwargs": '{"a": 1}',
}
TOGETHER = {"ssl_certfile", "ssl_keyfile", "control_vector_layer_range"}
"""Settings that require another one."""


def within_limits(info: FieldInfo) -> str:
    """Return the number nearest to 1 that a setting accepts."""
    least = max([1, *(getattr(each, "ge", 1) for each in info.metadata)])
    return str(min([least, *(getattr(each, "le", least) for each in info.metadata)]))


FLAGS = sorted(FIELDS.keys() - ENV_ONLY - BACKEND_FIELDS.keys() - {"config"} - TOGETHER)


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_a_variable_and_a_key_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(settings: Settings) -> object:
        return getattr(settings if hasattr(settings, name) else settings.engine, name)

    info, flag = FIELDS[name], name.replace("_", "-")
    is_switch = info.annotation is bool or bool in get_args(info.annotation)
    options = [get_args(each) or (each,) for each in get_args(info.annotation)]
    words = [each for each in chain(*options) if isinstance(each, str)]
    text = VALID.get(name, words[-1] if words else "false" if is_switch else within_limits(info))
    by_flag = load(f"--no-{flag}") if is_switch else load(f"--{flag}", text)
    monkeypatch.setenv(f"LLORCH_{name.upper()}", text)
    assert value(load()) == value(by_flag)
    monkeypatch.delenv(f"LLORCH_{name.upper()}")
    config = tmp_path / "c.toml"
    is_bare = isinstance(value(by_flag), int | float)
    config.write_text(f"{name} = {text if is_bare else repr(text)}\n")
    assert value(load("--config", str(config))) == value(by_flag)


@pytest.mark.parametrize("other", ["llorch_port", "LLORCH_Port"])
def test_one_setting_in_two_spellings_is_refused(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(other, "2")
    assert load().port == 2
    monkeypatch.setenv("LLORCH_PORT", "")
    assert load().port == 2, "one that is empty is none"
    monkeypatch.setenv("LLORCH_PORT", "3")
    both = {other, "LLORCH_PORT"}
    assert all(each in refusal() for each in both) and refusal().endswith("unset one.")
    monkeypatch.delenv("LLORCH_PORT")
    monkeypatch.setenv("llorch_prt", "1")
    assert refusal().startswith("The environment variable llorch_prt is not a setting")


def test_the_aliases_are_read_and_lose_to_our_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "/m.gguf")
    monkeypatch.setenv("BIND_ADDR", "[::1]:99")
    monkeypatch.setenv("CUDA_DEVICE", "3")
    settings = load(backend="cuda")
    assert (settings.model, settings.host, settings.port) == ("/m.gguf", ("::1",), 99)
    assert settings.engine.device_indices == (3,)
    assert load().engine.device_indices == (), "it is the CUDA worker's alone"
    monkeypatch.setenv("LLORCH_MODEL", "/other.gguf")
    assert load().model == "/other.gguf"
    for wrong in ("nonsense", "0.0.0.0:65536"):
        monkeypatch.setenv("BIND_ADDR", wrong)
        assert "BIND_ADDR" in refusal()
    monkeypatch.delenv("BIND_ADDR")
    for unknown in (
        "FOO",
        "TOKENX",
        "CACHE_REUSE",
    ):  # the common "LLORCH_" does not count as similarity
        with monkeypatch.context() as patch:
            patch.setenv(f"LLORCH_{unknown}", "1")
            end = f"LLORCH_{unknown} is not a setting; llorch-cpu --help lists them."
            assert refusal().endswith(end)
    monkeypatch.setenv("LLORCH_WORKER_TOKN", "1")
    assert refusal().endswith("did you mean LLORCH_WORKER_TOKEN?")


def test_each_start_has_its_own_worker_id() -> None:
    assert load().worker_id != load().worker_id
    assert load("--worker-id", "gpu-7").worker_id == "gpu-7"


@pytest.mark.parametrize("host", ["gpu-7", "w.example.", "192.0.2.1", "2001:db8::1"])
def test_a_host_is_told_to_others_as_it_is_given(host: str) -> None:
    settings = load("--advertise-host", host, "--allow-host", host)
    assert (settings.advertise_host, settings.allow_host) == (host, (host,))


def test_the_default_effort_is_the_templates_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a model's template would get the word."""
    assert load("--reasoning-effort", "default").reasoning_effort is None
    monkeypatch.setenv("LLORCH_REASONING_EFFORT", "high")
    assert load().reasoning_effort == "high"
    assert load("--reasoning-effort", "default").reasoning_effort is None


def test_switches_have_two_sides() -> None:
    assert load().engine.prefix_cache is True
    assert load("--no-prefix-cache").engine.prefix_cache is False
    assert load().engine.mmap is None
    assert load("--mmap").engine.mmap is True and load("--no-mmap").engine.mmap is False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "65536"], ["--port", "'65536'", "at most 65535"]),
        (["--port", "-1"], ["--port", "at least 0"]),
        (["--drain-timeout", "nan"], ["--drain-timeout"]),
        (["--stall-timeout", "inf"], ["--stall-timeout"]),
        (["--stall-timeout", "0"], ["--stall-timeout", "more than 0"]),
        (["--metrics-interval-ms", "100"], ["--metrics-interval-ms", "250 to 1000"]),
        (["--callback-url", "manager:9"], ["--callback-url", "http://"]),
        (["--callback-url", "ftp://manager/x"], ["--callback-url", "http://"]),
        (["--callback-url", "http://manager:99999/x"], ["--callback-url", "http://"]),
        (["--callback-url", "http://manager/a b"], ["--callback-url", "http://"]),
        (["--callback-url", "http://manager\n/x"], ["--callback-url", "http://"]),
        (["--worker-id", "two words"], ["--worker-id", "without spaces"]),
        (["--worker-id", ""], ["--worker-id"]),
        (["--served-model-name", ""], ["--served-model-name", "at least 1 character"]),
        (["--allow-origin", "chat.example"], ["--allow-origin", "https://"]),
        (["--allow-origin", "https://a.example/chat"], ["--allow-origin", "https://"]),
        (["--allow-origin", "a", "--allow-origin", "b"], ["--allow-origin is 'a', 'b'; it must"]),
        (["--advertise-host", "http://gpu-7"], ["--advertise-host", "without scheme and port"]),
        (["--advertise-host", "gpu-7:8080"], ["--advertise-host", "without scheme and port"]),
        (["--allow-host", "gpu.lan:8080"], ["--allow-host", "'gpu.lan:8080' is not"]),
        (["--kv-store", ""], ["--kv-store", "at least 1 character"]),
        (["--host", ""], ["--host is empty; it must be"]),
        (["--context-length", "1"], ["--context-length", "at least"]),
        (["--batch", "0"], ["--batch", "at least 1"]),
        (["--slots", "300"], ["--slots", "256"]),
        (["--slots", "16", "--batch", "8", "--micro-batch", "8"], ["--slots", "--batch"]),
        (["--micro-batch", "4096"], ["--micro-batch", "--batch"]),
        (["--log-format", "xml"], ["--log-format", "console"]),
        (["--n-gpu-layers", "20"], ["--n-gpu-layers", "llorch-cpu", "'0'"]),
        (["--max-body-bytes", "1"], ["--max-body-bytes", "1024"]),
        (["--speculate", "ngram", "--draft", "a.gguf"], ["--draft", "nothing would use it"]),
        (["--speculate", "draft"], ["--speculate", "there is no --draft model"]),
        (["--rope-scaling", "none", "--rope-scale", "4"], ["--rope-scale", "--rope-scaling"]),
        (["--rope-scale", "2", "--rope-freq-scale", "0.5"], ["--rope-scale", "give only one"]),
        (["--lora", "n=a.gguf", "--lora", "n=b.gguf"], ["--lora", "'n' is given twice"]),
        (["--override-kv", f"n=str:{'a' * 128}"], ["a key and a value of at most 127 bytes each"]),
    ],
    ids=lambda value: " ".join(value[:2]) if value and value[0].startswith("--") else "",
)
def test_a_wrong_value_is_named_with_what_would_be_right(
    flags: list[str], words: list[str]
) -> None:
    message = refusal(*flags)
    for word in words:
        assert word in message
    assert "\n" not in message and "validation error" not in message


def test_words_are_read_in_any_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLORCH_LOG_LEVEL", "INFO")
    file = tmp_path / "worker.toml"
    file.write_text('kv_type = "Q8_0"\nrope_scaling = "YaRN"')
    settings = load("--outtype", "Q4_K_M", "--config", str(file))
    assert (settings.outtype, settings.log_level) == ("q4_k_m", "info")
    assert (settings.engine.kv_type, settings.engine.rope_scaling) == ("q8_0", "yarn")


TEXTS = [name for name in FLAGS if not is_switch(FIELDS[name])]


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_text_and_no_number_is_no_value(name: str) -> None:
    """An empty text is a value only if it is the default, and for no samplers."""
    flag = f"--{name.replace('_', '-')}"
    if FIELDS[name].default == "" or name == "samplers":
        load(flag, "")
    else:
        assert refusal(flag, "").startswith(f"{flag} is ")
    if "Path" not in str(FIELDS[name].annotation):
        assert refusal(flag, "\udcff").startswith(f"{flag} is ")


LONG = "a" * 70_000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([LONG], "characters in all"),
        ([f"--{LONG}"], "is not a flag of"),
        (["--kv-store", f"/{LONG}"], "File name too long"),
        (["--chat-template", f"/{LONG}"], "File name too long"),
        (["--worker-id", LONG], "it must be a text of at most"),
    ],
    ids=["subcommand", "flag", "folder", "file", "text"],
)
def test_a_long_value_is_named_by_its_beginning_and_its_length(
    arguments: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load("cpu", parse_flags("cpu", arguments)).check_files()
    message = caught.value.message
    assert len(message) < 2000 and message == str(caught.value)
    assert LONG[:100] in message and reason in message
    assert re.search(r"\d\d,\d\d\d characters", message)


@pytest.mark.parametrize(
    "value", ['{"a": NaN}', '{"a": Infinity}', '{"a":' * 10**5, '{"a": "\\ud800"}']
)
def test_an_object_is_what_json_has(value: str) -> None:
    message = refusal("--chat-template-kwargs", value)
    assert "must be a JSON object such as" in message and len(message) < 400


def test_a_text_for_a_switch_of_a_template_is_refused() -> None:
    message = refusal("--chat-template-kwargs", '{"enable_thinking": "false"}')
    assert "must have true or false as enable_thinking, not a text" in message


@pytest.mark.parametrize("value", ["nan", "inf", "1979-05-27"])
def test_a_table_for_an_object_has_what_json_has(value: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f"chat_template_kwargs = {{a = {value}}}")
    assert "must be a JSON object such as" in refusal("--config", str(config))


def test_a_gpu_worker_takes_all_layers_or_does_not_start() -> None:
    assert load("--n-gpu-layers", "all", backend="cuda").n_gpu_layers == "all"
    for part in ("2", "99"):
        assert "only 'all' is possible" in refusal("--n-gpu-layers", part, backend="cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_device_flag_exists_on_its_own_command_alone(backend: Any) -> None:
    for owner in ("cuda", "vulkan", "metal"):
        flag = f"--{owner}-device"
        if owner == backend:
            assert load(flag, "1", backend=backend).engine.device_indices == (1,)
        else:
            assert f"not a flag of llorch-{backend}" in refusal(flag, "1", backend=backend)


def test_a_set_of_devices_is_named_with_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def indices(*flags: str) -> tuple[int, ...]:
        return load(*flags, backend="cuda").engine.device_indices

    assert indices("--cuda-device", "0,2") == (0, 2)
    assert indices("--cuda-device", "3", "--cuda-device", "1") == (3, 1)
    file = tmp_path / "c.toml"
    for text in ("[0, 1]", '"0,1"'):
        file.write_text(f"cuda_device = {text}\n")
        assert indices("--config", str(file)) == (0, 1)
    file.write_text("cuda_device = 2\n")
    assert indices("--config", str(file)) == (2,)
    for wrong in ("0,0", "0,x", "256", ",", "-1"):
        assert "--cuda-device" in refusal(f"--cuda-device={wrong}", backend="cuda")
    assert "one GPU" in refusal("--metal-device", "0,1", backend="metal")
    monkeypatch.setenv("LLORCH_CUDA_DEVICE", "1,0")
    assert indices() == (1, 0)


def test_each_backend_has_a_command_and_a_wheel() -> None:
    commands = {f"llorch-{name}": f"worker.cli:{name}" for name in BACKENDS}
    assert SCRIPTS.items() >= commands.items(), "of pyproject.toml"
    assert all(hasattr(cli, name) for name in BACKENDS)
    assert set(BACKENDS) == set(get_args(BackendName))
    assert set(BACKENDS) == set(pins.BACKENDS), "the recipes of builds/"
    for backend in BACKENDS.values():
        assert set(backend.fields) <= set(FIELDS)


def test_a_variable_of_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_CUDA_DEVICE", "1")
    assert "applies to llorch-cuda only" in refusal()
    assert load(backend="cuda").engine.device_indices == (1,)


def test_what_kubernetes_puts_into_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP_ADDR", "PORT"):
        monkeypatch.setenv(f"LLORCH_WORKER_{name}", "tcp://10.0.0.1:80")
    assert load().port == 8080
    monkeypatch.setenv("LLORCH_PORT", "tcp://10.0.0.1:80")
    assert "enableServiceLinks" in refusal()


def test_a_variable_in_small_letters_is_told_as_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('port = "x"\n')
    monkeypatch.setenv("llorch_config", str(config))
    assert refusal().startswith(f"port in {config} is 'x'; ")
    monkeypatch.setenv("llorch_port", "y")
    assert refusal().startswith("llorch_port is 'y'; ")


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_MODEL", "")
    monkeypatch.setenv("LLORCH_PORT", "")
    monkeypatch.setenv("LLORCH_CUDA_DEVICE", "")  # also those of another command
    assert (load().model, load().port) == (None, 8080)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["prot", "did you mean port"]),
        ("port = ", ["not valid TOML"]),
        ('worker_token = "x"', ["LLORCH_WORKER_TOKEN"]),
        ('slots = "many"', ["slots", "whole number"]),
        ("port = true", ["port", "is true; it is not a switch"]),
        ("cuda_device = 1", ["llorch-cuda only"]),
        (r'chat_template = "a\u0000b"', ["chat_template", "has the character U+0000"]),
        (r'lora = ["a\u0000b"]', ["lora", "has the character U+0000"]),
        ("samplers = 3", ["samplers in ", " is 3; it must be a text, or a list of texts"]),
        ("samplers = ['top_k', 3]", ["it must be a text, or a list of texts"]),
        ("config = 'other.toml'", ["config", "is not a setting"]),
        ("cache_reuse = 1", ["cache_reuse", "is not a setting; llorch-cpu --help lists them."]),
        ("kv-cells = 512\nkv_cells = 1024", ["kv_cells", "is given twice"]),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, words: list[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text(text + "\n")
    message = refusal("--config", str(config))
    for word in (*words, str(config)):
        assert word in message


def test_what_a_variable_says_beside_a_file_is_not_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.toml"
    config.write_text("port = 1\nslots = 1\n")
    monkeypatch.setenv("CUDA_DEVICE", "x")
    message = refusal("--config", str(config), backend="cuda")
    assert "CUDA_DEVICE is 'x'" in message and str(config) not in message


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("port = 1234\n", "utf-8-sig")
    assert load("--config", str(config)).port == 1234


def test_a_token_never_shows_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_WORKER_TOKEN", "very-secret")
    settings = load()
    assert settings.worker_token == "very-secret"
    assert "very-secret" not in repr(settings)
    assert "very-secret" not in refusal("--port", "99999")
    for name in ("LLORCH_WORKER_TOKEN", "LLORCH_CALLBACK_TOKEN"):
        monkeypatch.setenv(name, "very-secret\n")
        message = refusal()
        assert message.startswith(f"{name} is a secret that cannot be sent; it must consist of")
        assert "very-secret" not in message
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://me:hunter2@h/x", "me:hunter2@h", "http://[?key=hunter2"),
        *("http://me:hunter2#@h/x", "http://me:hunter2?@h/x"),
    ],
)
def test_no_secret_of_an_address_shows_in_a_message(url: str) -> None:
    message = refusal("--callback-url", url)
    assert "--callback-url" in message and "hunter2" not in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kv-store /store --no-prefix-cache", "it stores the prefix cache"),
        ("--ssl-certfile /a.pem", "--ssl-certfile and --ssl-keyfile go together"),
        ("--ssl-keyfile /a.pem", "--ssl-certfile and --ssl-keyfile go together"),
        ("--uds /socket --callback-url http://manager/", "a pool manager cannot reach a worker"),
        ("--control-vector-layer-range 1 2", "there is no --control-vector"),
        (
            "--control-vector /a.gguf --control-vector-layer-range 2 1",
            "its first layer comes after its last",
        ),
        ("--lora a=/a.gguf --served-model-name a", "'a' is a name of the model itself"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(flags: str, words: str) -> None:
    assert words in refusal(*flags.split())


@pytest.mark.parametrize("flag", ["--callback-url", "--heartbeat-url"])
def test_a_manager_gets_a_token_or_a_user(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = flag, "http://me:hunter2@manager:9200/x"
    load(*arguments)
    monkeypatch.setenv("LLORCH_CALLBACK_TOKEN", "sesame")
    message = refusal(*arguments)
    assert message.startswith(f"{flag} is 'http://manager:9200/x', but ")
    assert "instead of LLORCH_CALLBACK_TOKEN" in message


def test_several_faults_are_told_together() -> None:
    message = refusal("--port", "99999", "--slots", "0")
    assert "--port" in message and "slots" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ngl", "99"], "did you mean --n-gpu-layers?"),
        (["-c", "4096"], "did you mean --kv-cells or --context-length?"),
        (["--max-model-len", "64"], "did you mean --context-length?"),
        (["--api-key=x"], "did you mean the variable LLORCH_WORKER_TOKEN?"),
        (["--slot", "2"], "did you mean --slots?"),
        (["-hf", "o/r"], "did you mean --model?"),
        (["-hff=m.gguf"], "did you mean --model?"),
        (["--list-devices"], "did you mean the subcommand doctor?"),
        (["-n", "5"], "did you mean --max-tokens-out?"),
        (["--port", "1", "plan"], "A subcommand comes first: llorch-cpu plan …."),
        (["docter"], "did you mean doctor?"),
        (["my/model.gguf"], "a model is given as --model my/model.gguf."),
        (["serve"], "-cpu serves without one, and a model is given as --model serve."),
        (["serve", "m.gguf"], "cpu serves without one, and a model is given as --model m.gguf."),
        (["help"], "did you mean --help?"),
        (["-V"], "did you mean --version?"),
        (["--"], "-- ends the flags, and llorch-cpu takes nothing else; leave it out."),
        (["--", "--port", "1"], "and llorch-cpu takes nothing else; leave it out."),
        (["--qqqq"], "--help lists them."),
        (["--cuda-device", "0"], "it is a flag of llorch-cuda."),
        (["--kv_cells", "1"], "did you mean --kv-cells?"),
        (["--maxtokensout", "1"], "did you mean --max-tokens-out?"),
        (["--contxt-lenght", "1"], "did you mean --context-length?"),
        (["--temprature", "1"], "did you mean --temperature?"),
        (["--cache-reuse", "1"], "--help lists them."),
        (["-cb"], "; leave it out: this is always on here."),
        (["-s", "42"], "; it is a field of each request."),
        (["--webui"], "did you mean --page?"),
        (["--cache-prompt"], "did you mean --prefix-cache?"),
        (["--top-a", "1"], "--help lists them."),
        (["--model-path", "m"], "--help lists them."),
    ],
)
def test_what_another_program_takes_is_answered_with_our_name(
    arguments: list[str], words: str
) -> None:
    message = refusal(*arguments)
    assert message.endswith(words) and "x" not in message.split()


def test_a_backends_own_flag_is_none_of_another_command() -> None:
    with pytest.raises(ConfigError, match=r"did you mean --cuda-device\?$"):
        parse_flags("cuda", ["--cuda_device", "0"])


def test_all_flags_of_another_program_are_told_together() -> None:
    message = refusal("-m", "x.gguf", "-c", "4096", "--port", "1", "--jinja", "-c", "1")
    assert message == (
        "-m is not a flag of llorch-cpu; did you mean --model? "
        "-c is not a flag of llorch-cpu; did you mean --kv-cells or --context-length? "
        "--jinja is not a flag of llorch-cpu; leave it out: this is always on here."
    )


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_help_of_a_subcommand_is_of_the_flags_that_it_is_about(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_flags("cpu", ["--help"], name)
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-queued-requests" not in text and ("--port" in text or "--slots" in text)
    assert "llorch-cpu --help lists those that are not shown here" in text
    assert parse_flags("cpu", ["--max-queued-requests", "4"], name)


def test_the_help_of_an_optional_setting_shows_its_values_or_their_kind() -> None:
    text = _parser("cpu", None).format_help()
    assert "--pooling {none,mean,cls,last,rank}" in text and "--temperature NUMBER" in text


def test_a_second_subcommand_is_refused_beside_the_first() -> None:
    with pytest.raises(ConfigError, match=r"^chat is the subcommand already; plan is one of its"):
        parse_flags("cpu", ["plan"], "chat")


EMPTY = "an empty text is not a name"
NO_STREAM = "a stream cannot replace a file here"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model --outfile x.gguf", "did you mean DESTINATION, the word after SOURCE?"),
        ("model -o", "did you mean DESTINATION, the word after SOURCE?"),
        ("o/r x.gguf --remote", "did you mean SOURCE, as hf:owner/repo@revision?"),
        ("model x.gguf -q q4_0", "did you mean --outtype?"),
        ("model x.gguf --outtyp q4_0", "did you mean --outtype?"),
        ("model x.gguf --over", "llorch-convert convert --help lists them."),
        ("model x.gguf --vocab-only", "llorch-convert convert --help lists them."),
        ("list --familes", "did you mean --families?"),
        ("cache -q 1", "llorch-convert cache --help lists them."),
        *((f"{each} ''", EMPTY) for each in ("model", "inspect")),
        *((f"model x.gguf --{each} ''", EMPTY) for each in ("name", "pre-tokenizer", "cache-dir")),
        ("list --models-file ''", EMPTY),
        *((each, NO_STREAM) for each in ("model -", "inspect -", "model x.gguf --imatrix -")),
    ],
)
def test_what_the_converter_does_not_take_is_answered_with_what_it_does(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        convert.run(shlex.split(line))
    assert words in capsys.readouterr().err.rstrip().splitlines()[-1]


def test_a_text_may_begin_as_a_flag_does() -> None:
    parsed = parse_flags("cpu", ["--reasoning-budget-message", "-so it ends", "--port", "3"])
    assert parsed == {"reasoning_budget_message": "-so it ends", "port": "3"}


def test_other_programs_names_are_none_of_ours() -> None:
    commands = next(
        each for each in convert._parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    servers = [_parser(backend, None) for backend in BACKENDS]
    for parsers in (servers, [*commands.choices.values()]):
        own = {flag for parser in parsers for flag in parser._option_string_actions}
        foreign = parsers[0].other_names
        assert {name for name in foreign if name.startswith("--")} <= own | {"--version"}
        assert not own & {each for names in foreign.values() for each in names}


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_command_tells_its_version(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--version"])
    for variable in ("PYTHONSAFEPATH", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(variable, "")  # which each sets, and these tests restore
    module, _, function = SCRIPTS[name].partition(":")
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), function)()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{name} {own_version()}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_subcommand_is_a_module_that_runs(name: str) -> None:
    assert callable(importlib.import_module(f"worker.commands.{name}").run)


INTERRUPTED = """\
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name.startswith("worker.") and name != "worker.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from {module} import {function} as run
run()
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_command_is_interrupted_without_a_trace_of_its_imports(name: str) -> None:
    module, _, function = SCRIPTS[name].partition(":")
    code = INTERRUPTED.format(module=module, function=function)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("module", [convert, command, install_engine])
def test_each_argument_is_explained(module: Any) -> None:
    parsers = [module._parser()]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
                assert [each.dest for each in action._choices_actions] == [*action.choices]
                assert all(each.description for each in action.choices.values())
            else:
                assert action.help, (parser.prog, action.dest)


def test_the_help_shows_each_default_as_it_is_given() -> None:
    switches = {True: "on", False: "off"}
    for action in _parser("cpu", None)._actions:
        default = FIELDS[action.dest].default if action.dest in FIELDS else None
        if isinstance(default, bool | int | float | str) and default != "":
            shown = switches[default] if isinstance(default, bool) else default
            assert str(action.help).endswith(f"(default: {shown})"), action.dest


def test_more_threads_than_cpus_are_refused_where_they_would_run() -> None:
    n_cpus = os.cpu_count() or 1
    load("--threads", str(n_cpus)).check_machine()
    more = load("--threads", str(n_cpus + 1))
    with pytest.raises(ConfigError, match=f"this machine has {n_cpus} CPUs"):
        more.check_machine()


@pytest.mark.parametrize("arguments", ["--page=yes", "--no-page=1", "--help=me", "--mmap true"])
def test_a_switch_with_a_value_is_told_to_take_none(arguments: str) -> None:
    with pytest.raises(ConfigError, match=r"\w is a switch and takes no value, not"):
        parse_flags("cpu", arguments.split())
