"""Tries in a child process (`preflight_child`) what a start would do in native code.

Loading the wheel, initialising a driver and laying out a model all run code that may end its
process: by an instruction that this CPU lacks, a broken driver or a damaged file. `plan` and
`doctor` therefore ask a child, and report its death like any other answer.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.errors import BackendMismatch, WorkerError
from worker.wire.engine_settings import EngineSettings

CHILD: Sequence[str] = (sys.executable, "-m", "worker.devices.preflight_child")
SECONDS = 60.0
"""A driver that takes this long hangs, even on a busy machine."""


@dataclass(frozen=True, slots=True)
class Questions:
    """The steps of the child, in this order: library, device, trial, plan."""

    settings: EngineSettings
    trial_path: str | None = None
    """A small model to load, prove and run on the device."""
    plan_path: str | None = None
    """The model to plan."""
    model_ref: str = ""
    """The plan's name for the model."""
    adapter_bytes: int = 0
    """Of an adapter that is served with it."""
    draft_path: str | None = None
    """The model that guesses for it."""


@dataclass(slots=True)
class Findings:
    answers: dict[str, Any] = field(default_factory=dict)
    """The answers by step; a step that failed or was not reached is absent."""
    step: str = "library"
    """The last step that began."""
    error: WorkerError | None = None
    """The error that ended the step."""


@dataclass(frozen=True, slots=True)
class StepBegun:
    """The message that a step begins, on the child's standard output."""

    step: str


@dataclass(frozen=True, slots=True)
class StepAnswered:
    step: str
    answer: Any


@dataclass(frozen=True, slots=True)
class StepFailed:
    error: WorkerError


def ask(
    questions: Questions, *, child: Sequence[str] | None = None, timeout_seconds: float = SECONDS
) -> Findings:
    """Run the child to its end; whatever happens to it is in the findings."""
    try:
        ended = subprocess.run(
            child or CHILD,
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
                case StepBegun(step):
                    findings.step = step
                case StepAnswered(step, answer):
                    findings.answers[step] = answer
                case StepFailed(error):
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
