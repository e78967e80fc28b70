"""The questions about native code, asked in a process of their own.

Loading the wheel, waking a driver and laying out a model all run code that may end its process
(an instruction that this CPU lacks, a broken driver, a damaged file). `ask` is the caller, and
a child that dies is an answer like any other to it. `main` is the child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.errors import BackendMismatch, WorkerError
from worker.messages import EngineConfig

CHILD = (sys.executable, "-m", "worker.devices.inspection")
SECONDS = 60.0
"""Even on a busy machine a driver that takes this long hangs."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What the child is to find out, in this order: library, device, trial, plan."""

    config: EngineConfig
    trial_path: str | None = None
    """A small model to load, prove and compute with on the device."""
    plan: bool = True
    """Plan `config.model_path`."""


@dataclass(slots=True)
class Findings:
    answers: dict[str, Any] = field(default_factory=dict)
    """By step; a step that failed or was not reached is absent."""
    step: str = "library"
    """The last step that was begun."""
    error: WorkerError | None = None
    """Why it ended there."""


@dataclass(frozen=True, slots=True)
class _Begun:
    step: str


@dataclass(frozen=True, slots=True)
class _Answered:
    step: str
    answer: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    error: WorkerError


# --- the caller's side -------------------------------------------------------------------


def ask(
    questions: Questions, *, child: Sequence[str] = CHILD, timeout_seconds: float = SECONDS
) -> Findings:
    """Run the child to its end; whatever happens to it is in the findings."""
    try:
        ended = subprocess.run(
            child,
            input=pickle.dumps(questions),
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
        output, code, errors = ended.stdout, ended.returncode, ended.stderr
    except subprocess.TimeoutExpired as expired:
        output, code, errors = expired.stdout or b"", None, expired.stderr or b""
    findings = _read(output)
    if findings.error is None and code is None:
        findings.error = BackendMismatch(
            f"The native library did not answer within {timeout_seconds:g} seconds "
            f"({_DOING[findings.step]}); a driver may hang."
        )
    elif findings.error is None and code != 0:
        findings.error = _crash(findings.step, code or 0, errors)
    return findings


_DOING = {
    "library": "while it was loaded",
    "device": "while devices were looked for",
    "trial": "while it computed with a small model",
    "plan": "while the model was laid out",
}


def _read(output: bytes) -> Findings:
    findings = Findings()
    stream = io.BytesIO(output)
    # A child that died may have left half a message.
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            match pickle.load(stream):
                case _Begun(step):
                    findings.step = step
                case _Answered(step, answer):
                    findings.answers[step] = answer
                case _Failed(error):
                    findings.error = error
    return findings


def _crash(step: str, code: int, errors: bytes) -> WorkerError:
    doing = _DOING[step]
    if code == -signal.SIGILL:
        return BackendMismatch(
            f"The native library ended with SIGILL {doing}: the installed wheel uses instructions "
            "that this CPU does not have; install the wheel with all CPU variants.",
            signal="SIGILL",
        )
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    told = f" ({lines[-1].strip()})" if lines else ""
    return BackendMismatch(f"The native library ended with {name} {doing}{told}.", signal=name)


# --- the child ---------------------------------------------------------------------------


def main() -> None:
    # Native code may print; what it prints must not come between our messages.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions: Questions = pickle.load(sys.stdin.buffer)

    def tell(message: _Begun | _Answered | _Failed) -> None:
        pickle.dump(message, channel)
        channel.flush()

    try:
        for step, answer in _steps(questions):
            tell(_Begun(step))
            tell(_Answered(step, answer()))
    except WorkerError as error:
        tell(_Failed(error))
    # Tearing native code down in order proves nothing and may fail.
    os._exit(0)


def _steps(questions: Questions) -> Iterator[tuple[str, Callable[[], Any]]]:
    config = questions.config
    yield "library", _library
    yield "device", lambda: _device(config)
    if questions.trial_path is not None:
        trial_config = dataclasses.replace(
            config,
            model_path=questions.trial_path,
            slots=1,
            context_length=256,
            kv_type="f16",
            flash_attention="auto",
        )
        yield "trial", lambda: _trial(trial_config)
    if questions.plan:
        yield "plan", lambda: _plan(config)


def _library() -> dict[str, Any]:
    from worker.devices import driver, probe
    from worker.llama import library

    library.load()
    return {
        "versions": library.versions(),
        "build": probe.wheel_stamp(),
        "cpu_variant": probe.cpu_variant(),
        "cpu_features": driver.cpu_features(library.system_info()),
        "driver": driver.version(),
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "kind": device.kind,
                "backend": device.registry,
                "free_bytes": device.free_bytes,
                "total_bytes": device.total_bytes,
            }
            for device in library.devices()
        ],
    }


def _device(config: EngineConfig) -> str:
    from worker.devices import probe

    return probe.select_device(config).name


def _trial(config: EngineConfig) -> dict[str, Any]:
    """Everything that a start does, on the small model."""
    from worker.devices import memory, probe, residency
    from worker.llama import warmup
    from worker.llama.context import Context
    from worker.llama.model import LoadOptions, Model
    from worker.models.gguf import read_header

    began = time.monotonic()
    selected = probe.select_device(config)
    placement = residency.tensor_placement(selected, read_header(config.model_path))
    options = LoadOptions(
        device=selected.device,
        mmap=selected.device is None,
        mlock=config.mlock,
        tensor_placement=placement,
    )
    model = Model(config.model_path, options)
    context = Context(model, memory.context_options(config, 256, threads=1, embeds=False))
    proof = residency.prove(model, context, selected, config)
    warmup.warm_up(model, context)
    return {
        "device": proof.device,
        "resident": proof.resident,
        "seconds": round(time.monotonic() - began, 2),
    }


def _plan(config: EngineConfig) -> Any:
    from worker.devices import memory, probe
    from worker.devices.cpu_budget import cpu_budget
    from worker.models.gguf import read_header

    selected = probe.select_device(config)
    header = read_header(config.model_path)
    return memory.plan(header, config, selected.device, cpu_budget(config.threads))


if __name__ == "__main__":
    # Pickle names classes by their module, and in a child started with -m ours is `__main__`.
    from worker.devices import inspection

    inspection.main()
