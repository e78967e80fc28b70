"""Native code in a separate process: its answers and crashes."""

from __future__ import annotations

import sys
import time

import pytest

from tests.support import clock
from tests.support.devices import rpc
from tests.support.devices.fixtures import Given, MakeConfig
from worker.devices.preflight import ChosenDevice, Findings, Library, Questions, ask
from worker.errors import BackendMismatch, ConfigError, InsufficientVram
from worker.wire.messages import LoadModel

OF_GPU = ("tests.support.devices.gpu_child", "worker.devices.preflight_child")
GPU_CHILD = (sys.executable, "-m", *OF_GPU)
BEGIN = (
    "import json, sys, os, signal, time\n"
    "library = dict(versions={}, build={}, cpu_variant=None, cpu_features=[], driver={}, "
    "devices=[])\n"
    "print(json.dumps(dict(step='device', library=library)), flush=True)\n"
)


def child(code: str) -> list[str]:
    return [sys.executable, "-c", BEGIN + code]


def load_of(source: Given) -> LoadModel:
    return LoadModel(source.settings, source.model_path, "the model", "worker")


def died(config: MakeConfig, code: str, seconds: float = 60.0) -> Findings:
    findings = ask(Questions(config("cpu").settings), child=child(code), timeout_seconds=seconds)
    assert findings.library == Library({}, {}, None, [], {}, [])
    assert findings.device is None
    assert findings.step == "device"
    assert isinstance(findings.error, BackendMismatch)
    return findings


def test_all_questions_are_answered_in_order(config: MakeConfig) -> None:
    source = config("cpu", "grouped-q8", slots=2, context_length=512)
    findings = ask(Questions(source.settings, source.model_path, load_of(source)))
    assert findings.error is None
    assert findings.device == [ChosenDevice("CPU")]
    assert findings.trial is not None and findings.trial.resident
    assert findings.plan is not None and findings.plan.context_length == 512
    library = findings.library
    assert library is not None
    assert library.devices[0].name == "CPU"
    assert library.versions["llama_cpp_python"]


def test_a_device_that_plays_the_gpu_is_tried_and_planned_for(config: MakeConfig) -> None:
    with rpc.serve() as (setting, _):
        source = config("cuda", "tied-q4", slots=2, context_length=512)
        questions = Questions(source.settings, source.model_path, load_of(source))
        findings = ask(questions, child=[*GPU_CHILD, setting])
    assert findings.error is None
    assert findings.trial is not None and findings.trial.device == "RPC0"
    assert findings.plan is not None and findings.plan.device == "RPC0"


def test_an_error_arrives_whole(config: MakeConfig) -> None:
    source = config("cpu", "tied-q4", slots=64, context_length=2**20)
    findings = ask(Questions(source.settings, load=load_of(source)))
    assert isinstance(findings.error, InsufficientVram)
    assert findings.step == "plan"
    assert findings.error.details["needed_bytes"] > findings.error.details["available_bytes"]


def test_a_missing_gpu_is_reported_in_time(config: MakeConfig) -> None:
    with clock.at_most(seconds=10):
        findings = ask(Questions(config("cuda").settings))
    assert isinstance(findings.error, BackendMismatch)
    assert findings.step == "device"


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("os.kill(os.getpid(), signal.SIGILL)", ("SIGILL", "all CPU variants")),
        ("os.abort()", ("SIGABRT",)),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ("SIGSEGV",)),
        (
            "print('CUDA error: oh no', file=sys.stderr); os._exit(70)",
            ("exit code 70", "CUDA error: oh no"),
        ),
        # A partial message does not count.
        ("sys.stdout.write('{\"step\": '); sys.stdout.flush(); os.abort()", ("SIGABRT",)),
    ],
)
def test_a_crash_is_reported_with_the_step_and_the_last_output(
    code: str, output: tuple[str, ...], config: MakeConfig
) -> None:
    error = died(config, code).error
    assert error is not None and error.exit_code == 4
    for words in (*output, "while it looked for devices"):
        assert words in error.message


def test_a_path_that_is_not_utf_8_is_refused(config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="not UTF-8; give the file or its folder another name"):
        ask(Questions(config("cpu").settings, "/models/\udcff.gguf"))


def test_a_driver_that_hangs_is_not_waited_for(config: MakeConfig) -> None:
    began = time.monotonic()
    error = died(config, "time.sleep(600)", seconds=2.0).error
    assert clock.in_time(began, 120)
    assert error is not None and "did not answer within 2 seconds" in error.message


@pytest.mark.parametrize(
    "line", ["[]", '{"step": "other"}', '{"plan": 3}', '{"error": ["X"]}', "\\xff"]
)
def test_nonsense_is_an_error(line: str, config: MakeConfig) -> None:
    findings = ask(Questions(config("cpu").settings), child=child(f"print({line!r})"))
    assert isinstance(findings.error, BackendMismatch)
    assert "sent nonsense" in findings.error.message
