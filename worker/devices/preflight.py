"""What a start would meet in native code, found out by a child process (`preflight_child`).

Loading the wheel, waking a driver and laying out a model all run code that may end its process: an
instruction that this CPU lacks, a broken driver, a damaged file. So `plan` and `doctor` ask a child
and survive its death, which is an answer like any other.
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
"""Even on a busy machine a driver that takes this long hangs."""


@dataclass(frozen=True, slots=True)
class Questions:
    """What the child is to find out, in this order: library, device, trial, plan."""

    settings: EngineSettings
    trial_path: str | None = None
    """A small model to load, prove and compute with on the device."""
    plan_path: str | None = None
    """The model to plan."""
    model_ref: str = ""
    """How the plan calls it."""
    adapter_bytes: int = 0
    """Of an adapter that is served with it."""
    draft_path: str | None = None
    """The model that guesses for it."""


@dataclass(slots=True)
class Findings:
    answers: dict[str, Any] = field(default_factory=dict)
    """By step; a step that failed or was not reached is absent."""
    step: str = "library"
    """The last step that was begun."""
    error: WorkerError | None = None
    """Why it ended there."""


@dataclass(frozen=True, slots=True)
class StepBegun:
    """One of the messages that the child writes to its standard output: a step begins."""

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
