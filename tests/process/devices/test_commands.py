"""`plan` and `doctor` as a user runs them: the command in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import StartWorker
from tests.support.bundled import (
    bundled_gguf,
    bundled_pooling,
    bundled_with,
    bundled_with_template,
)
from tests.support.commands import DEAF, diagnose, loaded, plan_refused, raised, start_refused
from tests.support.devices import rpc
from tests.support.hub_server import Repo, running_hub
from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from tests.support.worker import environment, installed, shown, until
from worker import installation
from worker.commands import doctor
from worker.devices import preflight
from worker.engine.text.chat_template import template_of
from worker.errors import ConfigError, WorkerError
from worker.llama.model import LoadOptions, Model
from worker.models.resolve import bundled_folder, resolve
from worker.setting_files import MAX_TEMPLATE_CHARS

NOBODY = "http://127.0.0.1:9/ready"


@pytest.fixture(scope="module")
def own_gpu() -> Iterator[list[str]]:
    """`llorch-cuda` on a device that stands in for a GPU, which the commands of this file share."""
    with rpc.serve(free_bytes=1 << 30) as (setting, _):
        yield rpc.cuda_command(setting)


def run(
    *arguments: str,
    cache: Path,
    of: list[str] | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(of or installed("cpu")), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(cache, env),
        cwd=cache,
    )


def flags(model: Path, slots: int, context_length: int) -> list[str]:
    sizes = ["--slots", str(slots), "--context-length", str(context_length)]
    return ["--model", str(model), *sizes]


# --- plan ----------------------------------------------------------------------------------


def test_plan_prints_a_table(models: dict[str, Path], warm_cache: Path, own_gpu: list[str]) -> None:
    # The device's memory is known here: on a large machine, all other bars would be too short.
    ended = run("plan", *flags(models["tied-q4"], 2, 512), cache=warm_cache, of=own_gpu)
    assert ended.returncode == 0, ended.stderr
    for words in (" on RPC0: ", "2 slots × 512 tokens", "on the host:"):
        assert words in ended.stdout
    for part in ("weights", "kv", "compute", "output", "margin", "needed", "available"):
        assert re.search(rf"^  {part} +[\d,.]+ MiB(  +[█▏]+)?$", ended.stdout, re.MULTILINE), part
    assert ended.stdout.endswith("It fits.\n")
    bars = re.findall(r"^  (\w+) .*MiB  ( *)(█+)", ended.stdout, re.MULTILINE)
    assert {name for name, _, _ in bars} >= {"margin", "needed", "available"}
    assert max(len(gap) + len(bar) for _, gap, bar in bars) == 40


def test_a_plan_is_printed_in_ascii_if_the_terminal_has_nothing_else(warm_cache: Path) -> None:
    ended = run("plan", cache=warm_cache, env={"PYTHONIOENCODING": "ascii"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii() and ended.stdout.endswith("It fits.\n")


def test_a_cache_that_the_system_refuses_is_named_with_its_flag(warm_cache: Path) -> None:
    cache = f"/tmp/{'x' * 300}"
    start = run("--port", "0", "--cache-dir", cache, cache=warm_cache)
    planned, report = plan_refused(Path(cache)), diagnose(Path(cache), DEAF)
    assert start.returncode == planned.exit_code == report.exit_code == 3
    assert "Traceback" not in start.stderr and "OSError" not in start.stderr
    for text in (start.stderr, planned.message, report.as_screen()):
        assert ": File name too long; " in text and "--cache-dir" in text


def test_a_trial_for_which_the_device_has_no_memory_is_reported(warm_cache: Path) -> None:
    why = "the device cannot compute a full step"
    told = json.dumps({"step": "trial", "error": ["INSUFFICIENT_VRAM", why, {}]})
    report = diagnose(warm_cache, [sys.executable, "-c", f"print({told!r})"])
    assert report.exit_code == 5 and report.plan is None
    assert [(c.name, c.text) for c in report.checks if c.error] == [("trial", why)]


def test_a_plan_that_does_not_fit_exits_with_5_and_says_what_would(
    models: dict[str, Path], warm_cache: Path, own_gpu: list[str]
) -> None:
    arguments = ["plan", *flags(models["tied-q4"], 32, 2048)]
    ended = run(*arguments, cache=warm_cache, of=own_gpu)
    assert ended.returncode == 5
    assert "It does not fit. What would fit: --context-length" in ended.stdout
    sentence = ended.stderr.strip().splitlines()[-1]
    assert sentence.startswith("llorch-cuda: The model does not fit on RPC0")
    assert "Traceback" not in ended.stderr


def test_a_model_that_llama_cpp_refuses_exits_with_3(
    models: dict[str, Path], warm_cache: Path, tmp_path: Path
) -> None:
    """A valid header whose tensors have other shapes."""
    damaged = tmp_path / "damaged.gguf"
    content = models["grouped-q8"].read_bytes()
    key = b"llama.attention.head_count_kv"
    damaged.write_bytes(content.replace(key, b"llama.attention.head_count_zz"))
    ended = run("plan", *flags(damaged, 1, 256), cache=warm_cache)
    assert ended.returncode == 3
    assert "llama.cpp cannot load" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def told_alike(cache: Path, settings: dict[str, Any], start: WorkerError) -> None:
    """Check that plan and doctor end with the error of a start, and print nothing before it."""
    planned = plan_refused(cache, **settings)
    assert (type(planned), planned.message) == (type(start), start.message)
    report = diagnose(cache, DEAF, **settings)
    assert report.exit_code == start.exit_code
    assert [check.text for check in report.checks if check.error] == [start.message]


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template": "nowhere.jinja"},
        {"chat_template": "long.jinja"},
        {"kv_store": "/proc/store"},
        {"kv_store": "a-link-to-nothing"},
        {"kv_store": "long" * 64},
        {"api_key_file": "a-file"},
        {"api_key_file": "a-pipe"},
        {"ssl_certfile": "a-file", "ssl_keyfile": "a-file"},
    ],
    ids=" ".join,
)
def test_plan_and_doctor_refuse_each_file_with_which_a_start_fails(
    files: dict[str, str], tmp_path: Path, warm_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same message and code, and so does the doctor."""
    (tmp_path / "a-file").touch()
    os.mkfifo(tmp_path / "a-pipe")
    (tmp_path / "a-link-to-nothing").symlink_to("nothing")
    (tmp_path / "long.jinja").write_text("x" * (MAX_TEMPLATE_CHARS + 1))
    there = {name: str(tmp_path / file) for name, file in files.items()}
    start = start_refused(warm_cache, **there)
    assert isinstance(start, ConfigError)
    told_alike(warm_cache, there, start)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("folder", ["/proc/cache", "a-file", "a-file/below", "long" * 64])
def test_doctor_names_an_unusable_cache(folder: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    (check,) = [c for c in diagnose(tmp_path / folder, DEAF).checks if c.name == "cache"]
    assert "cannot be used" in check.text and "set --cache-dir" in check.text


HOSTILE = "{{ cycler.__init__.__globals__.os.popen('id').read() }}"


@pytest.mark.parametrize(
    ("whose", "template", "words"),
    [
        ("model", HOSTILE, "'__globals__', an internal of Python"),
        ("tool_use", "{% if %}", "Expected an expression"),
        ("chat_template", "{% if %}", "Expected an expression"),
    ],
)
def test_plan_and_doctor_refuse_a_template_with_which_a_start_fails(
    whose: str, template: str, words: str, tmp_path: Path, warm_cache: Path
) -> None:
    file = tmp_path / "given"
    if whose == "model":
        file = bundled_with_template(tmp_path / "m.gguf", template)
    elif whose == "tool_use":  # the model's second template, for chats with tools
        file = bundled_with(tmp_path / "m.gguf", {"tokenizer.chat_template.tool_use": template})
    else:
        file.write_text(template)
    operators = str(file) if whose == "chat_template" else None
    model = Model(str(bundled_gguf() if operators else file), LoadOptions(vocab_only=True))
    start = raised(lambda: template_of(model, operators))
    model.close()
    assert words in start.message
    told_alike(warm_cache, {"chat_template" if operators else "model": str(file)}, start)
    if whose == "model":  # an engine needs it at its start
        ended = run("--model", str(file), "--port", "0", cache=warm_cache)
        assert ended.returncode == start.exit_code == 3 and "Traceback" not in ended.stderr
        assert ended.stderr.splitlines()[-1] == f"llorch-cpu: {start.message}"


# --- doctor --------------------------------------------------------------------------------


def test_doctor_finds_all_checks_ok_where_a_worker_starts(warm_cache: Path) -> None:
    ended = run("doctor", "--port", "0", cache=warm_cache)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name in ("machine", "threads", "memory", "cache", "port", "library", "cpu variant"):
        assert re.search(rf"^ok +{name} ", ended.stdout, re.MULTILINE), name
    for name in ("found", "device", "trial", "model", "plan"):
        assert re.search(rf"^ok +{name} ", ended.stdout, re.MULTILINE), name
    assert ended.stdout.endswith("llorch-cpu would start on this machine.\n")


def test_doctor_as_json(warm_cache: Path) -> None:
    report = shown("doctor", warm_cache)
    assert report["would_start"] is True and report["exit_code"] == 0
    assert {check["status"] for check in report["checks"]} == {"ok"}
    assert report["threads"] >= 1 and report["plan"]["fits"] is True
    assert report["trial"]["resident"] is True
    assert report["library"]["devices"]
    if sys.platform == "linux":
        walls = [wall["name"] for wall in report["trial"]["walls"]]
        assert walls == ["core_dumps", "files", "system_calls"]


def test_doctor_reports_that_nothing_is_confined(warm_cache: Path) -> None:
    report = diagnose(warm_cache, confine=False)
    [confined] = [check for check in report.checks if check.name == "confined"]
    assert confined.status == "unknown" and report.exit_code == 0


def test_doctor_on_a_wheel_without_a_gpu_exits_with_4(warm_cache: Path) -> None:
    ended = run("doctor", "--port", "0", cache=warm_cache, of=installed("cuda"))
    assert ended.returncode == 4
    assert re.search(r"^FAILED +device +llorch-cuda needs", ended.stdout, re.MULTILINE)
    assert "llorch-cuda would not start on this machine (exit code 4)." in ended.stdout


def test_doctor_with_a_gpu_that_is_too_small_exits_with_5(
    models: dict[str, Path], warm_cache: Path, own_gpu: list[str]
) -> None:
    arguments = ["--port", "0", *flags(models["tied-q4"], 32, 2048)]
    ended = run("doctor", *arguments, cache=warm_cache, of=own_gpu)
    assert ended.returncode == 5
    assert re.search(r"^ok +trial ", ended.stdout, re.MULTILINE)
    assert re.search(r"^FAILED +plan +.*What would fit", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("model", {"model": "./nowhere.gguf"}, 3),
        ("projector", {"mmproj": "./nowhere.gguf"}, 3),
        ("port", {}, 7),
    ],
)
def test_doctor_finds_what_a_start_would_fail_for(
    warm_cache: Path, name: str, settings: dict[str, str], code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if name == "port" else 0
        report = diagnose(warm_cache, DEAF, **settings | {"port": str(port)})
    assert report.exit_code == code
    assert re.search(rf"^FAILED +{name} ", report.as_screen(), re.MULTILINE)


def test_doctor_writes_an_ipv6_address_in_brackets(warm_cache: Path) -> None:
    report = diagnose(warm_cache, DEAF, host="127.0.0.1,::1")
    [port] = [check.text for check in report.checks if check.name == "port"]
    assert port == "127.0.0.1:0, [::1]:0 is free"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uds", "a-file"),
        ("uds", "a" * 120),
        ("uds", "nowhere/a-socket"),
        ("uds", "/proc/a-socket"),
        ("host", "a b"),
        ("host", "192.0.2.1"),
    ],
)
def test_doctor_names_the_code_and_the_fault_of_a_start(
    name: str, value: str, warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (warm_cache / "a-file").touch()
    monkeypatch.chdir(warm_cache)  # where a start looks, too
    start = start_refused(warm_cache, **{name: value})
    report = diagnose(warm_cache, DEAF, **{name: value})
    assert report.exit_code == start.exit_code == 2
    assert [check.text for check in report.checks if check.error] == [start.message]


def test_doctor_reports_that_a_model_cannot_guess(warm_cache: Path) -> None:
    report = diagnose(warm_cache, speculate="mtp")
    [error] = [check.text for check in report.checks if check.error]
    assert report.exit_code == 2 and "has no layers for multi-token prediction" in error


@pytest.mark.parametrize("setting", ["model", "draft"])
def test_doctor_downloads_nothing(setting: str, warm_cache: Path) -> None:
    """In a process that has not loaded the hub's library, which reads the environment at its
    import."""
    arguments = ["--port", "0", f"--{setting}", "hf:someone/a-model@main::file=model.gguf"]
    ended = run("doctor", *arguments, cache=warm_cache, env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert re.search(rf"^unknown +{setting} .*first start downloads it", ended.stdout, re.MULTILINE)
    assert ended.returncode == 0


def test_doctor_plans_the_projector_too(warm_cache: Path) -> None:
    files = {"model": str(random_model("dense")), "mmproj": str(random_projector("gemma3"))}
    report = diagnose(warm_cache, **files, slots="1", context_length="256")
    assert report.plan is not None and report.plan.parts["projector"] > 0
    [line] = [check.text for check in report.checks if check.name == "plan"]
    assert line.endswith(" GiB for 1 slot up to 256 tokens"), "in the plan's own words"


def test_doctor_survives_a_wheel_that_crashes(warm_cache: Path) -> None:
    crash = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
    report = diagnose(warm_cache, crash)
    [failed] = [check for check in report.checks if check.status == "failed"]
    assert failed.name == "library" and "SIGILL" in failed.text
    assert report.exit_code == 4
    assert "would not start" in report.as_screen()
    assert report.as_dict()["library"] is None


def test_plan_and_doctor_wait_for_a_driver_as_long_as_the_worker_would(
    warm_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "SECONDS", 0.5)
    hung = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(preflight, "CHILD", hung)
    report = diagnose(warm_cache, hung, stall_timeout="1.5")
    [failed] = [check for check in report.checks if check.status == "failed"]
    for text in failed.text, plan_refused(warm_cache, stall_timeout="1.5").message:
        assert "within 1.5 seconds" in text and "--stall-timeout" in text


def test_doctor_recognises_a_checkpoint_without_converting_it(
    warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    for name, child in ((str(tmp_path), preflight.CHILD), (tmp_path.name, DEAF)):
        report = diagnose(warm_cache, child, model=name)
        [model] = [check for check in report.checks if check.name == "model"]
        assert model.status == "unknown" and "would be converted" in model.text
        assert report.details["plan"] is None
        assert report.exit_code == 0


def test_doctor_makes_no_folder_where_there_is_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "ENGINE", "no-such-engine")
    report = diagnose(tmp_path / "cache")
    [model] = [check for check in report.checks if check.name == "model"]
    assert model.status == "failed" and "install-engine" in model.text
    assert not (tmp_path / "cache").exists()


def test_an_unusable_cache_is_no_fault_for_a_model_that_needs_none(
    models: dict[str, Path], start_worker: StartWorker, tmp_path: Path
) -> None:
    """A start with the same settings needs no cache, either."""
    cache = tmp_path / "cache"
    cache.write_text("not a folder")
    model_flags = flags(models["tied-q4"], 2, 512)
    ended = run("doctor", "--port", "0", "--cache-dir", str(cache), *model_flags, cache=tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert re.search(r"^ok +cache .*cannot be used.*need none", ended.stdout, re.MULTILINE)
    assert start_worker(*model_flags, cache_dir=cache).is_ready()


@pytest.mark.parametrize("model", [None, "checkpoint"])
def test_without_a_cache_the_doctor_names_the_exit_code_of_a_start(
    tmp_path: Path, model: str | None
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    (tmp_path / "checkpoint").symlink_to(bundled_folder())
    setting = {} if model is None else {"model": str(tmp_path / model)}
    there = loaded(tmp_path / "cache", **setting)
    report = doctor.diagnose(there, child=DEAF)
    start = raised(lambda: asyncio.run(resolve(there, there.model)))
    assert report.exit_code == start.exit_code == 3 and "The cache folder" in start.message
    assert [check.status for check in report.checks if check.name == "cache"] == ["failed"]


def test_without_a_cache_nothing_can_be_downloaded(models: dict[str, Path], tmp_path: Path) -> None:
    (cache := tmp_path / "cache").write_text("not a folder")
    model = "hf:o/r::file=m.gguf"
    report = diagnose(cache, DEAF, model=model)
    assert [check.status for check in report.checks if check.name == "cache"] == ["failed"]
    with running_hub() as hub:
        hub.repos["o/r"] = Repo({"m.gguf": models["wide-heads"].read_bytes()})
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
        }  # else it is as the doctor left it
        arguments = ["--model", model, "--port", "0", "--cache-dir", str(cache)]
        ended = run(*arguments, cache=tmp_path, env=env)
    assert ended.returncode == report.exit_code == 6
    assert "The cache folder" in ended.stderr, ended.stderr


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_an_interrupted_command_exits_with_130(command: str, warm_cache: Path) -> None:
    child = subprocess.Popen(
        [*installed("cpu"), command, "--port", "0"],
        stdout=subprocess.PIPE, env=environment(warm_cache), cwd=warm_cache,
    )  # fmt: skip
    until(lambda: psutil.Process(child.pid).children(), lambda: "it asks no other process")
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=60)[0] == b""
    assert child.returncode == 130


# --- bench ---------------------------------------------------------------------------------


def test_bench_starts_and_measures_a_worker(warm_cache: Path, tmp_path: Path) -> None:
    ended = run("bench", "--json", "--threads", "1", "--callback-url", NOBODY, cache=warm_cache)
    assert ended.returncode == 0, ended.stderr
    shown = json.loads(ended.stdout)
    assert shown["device"] == "CPU"
    assert [load["streams"] for load in shown["loads"]] == [1, 4, 16]
    for load in shown["loads"]:
        assert load["output_tokens"] == 48 * load["streams"]
        assert load["tokens_per_second"] > 0
        assert 0 < load["first_token_ms"] < 60_000
    ended = run("bench", "--model", "./nowhere.gguf", cache=warm_cache)
    assert ended.returncode == 3
    assert "nowhere.gguf" in ended.stderr.splitlines()[-1]
    pooling = bundled_pooling(tmp_path / "pooling.gguf")
    ended = run("bench", "--model", str(pooling), cache=warm_cache)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "generates no text" in ended.stderr.splitlines()[-1]
