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
_DOING = {
    "library": "while it was loaded",
    "device": "while devices were looked for",
    "trial": "while it computed with a small model",
    "plan": "while the model was laid out",
}
"""The child's steps, in their order."""


@dataclass(frozen=True, slots=True)
class Questions:
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

    @property
    def steps(self) -> list[str]:
        skipped = {"trial": self.trial_path is None, "plan": self.plan_path is None}
        return [step for step in _DOING if not skipped.get(step)]


@dataclass(slots=True)
class Findings:
    answers: dict[str, Any] = field(default_factory=dict)
    """The answers by step; a step that failed or was not reached is absent."""
    step: str = "library"
    """The last step that began."""
    error: WorkerError | None = None
    """The error that ended the step."""


def ask(
    questions: Questions, *, child: Sequence[str] | None = None, timeout_seconds: float = SECONDS
) -> Findings:
    """Run the child to its end; whatever happens to it is in the findings.

    The child gets the pickled questions, and writes one pickle for each step that ends: its answer,
    or the `WorkerError` that was the last of it.
    """
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
        output, code, errors = expired.stdout or b"", None, b""
    findings = Findings()
    stream = io.BytesIO(output)
    # A child that died may have left half an answer.
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        for step in questions.steps:
            findings.step = step
            answer = pickle.load(stream)
            if isinstance(answer, WorkerError):
                findings.error = answer
                return findings
            findings.answers[step] = answer
    if code != 0:
        findings.error = _death(code, errors, _DOING[findings.step], timeout_seconds)
    return findings


def _death(code: int | None, errors: bytes, doing: str, seconds: float) -> BackendMismatch:
    """How the child ended: its exit code, or `None` if it did not."""
    if code is None:
        return BackendMismatch(
            f"The native library did not answer within {seconds:g} seconds ({doing}); "
            "a driver may hang."
        )
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
