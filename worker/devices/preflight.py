"""Tries in a child process (`preflight_child`) what a start would do in native code.

Loading the wheel, initialising a driver and laying out a model all run code that may end its
process: by an instruction that this CPU lacks, a broken driver or a damaged file. `plan` and
`doctor` therefore ask a child, and report its death like any other answer.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from worker.child_processes import engine_environment
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan.plan import Plan
from worker.errors import BackendMismatch, InsufficientVram, WorkerError
from worker.wire.codec import check_sendable, from_data
from worker.wire.engine_info import Wall
from worker.wire.engine_settings import EngineSettings
from worker.wire.messages import LoadModel

if TYPE_CHECKING:
    from worker.settings import Settings

CHILD: Sequence[str] = (sys.executable, "-m", "worker.devices.preflight_child")
SECONDS = 120.0
"""The least patience with the child, enough for a sound driver on a busy machine."""
Step = Literal["library", "device", "trial", "plan"]
_DOING: dict[Step, str] = {
    "library": "while it was loaded",
    "device": "while it looked for devices",
    "trial": "while it computed with a small model",
    "plan": "while it laid out the model",
}
"""The child's steps, in their order."""


class Questions(msgspec.Struct, frozen=True):
    settings: EngineSettings
    trial_path: str | None = None
    """A small model to load, prove and run on the device."""
    load: LoadModel | None = None
    """The start to plan."""
    driver_cache: str | None = None
    """A folder for what a GPU's driver compiles."""

    @property
    def steps(self) -> list[Step]:
        skipped = {"trial": self.trial_path is None, "plan": self.load is None}
        return [step for step in _DOING if not skipped.get(step)]


class ListedDevice(msgspec.Struct, frozen=True):
    name: str
    description: str
    kind: str
    backend: str


class Library(msgspec.Struct, frozen=True):
    """The wheel, and the devices that it finds."""

    versions: dict[str, str]
    build: dict[str, Any]
    cpu_variant: str | None
    cpu_features: list[str]
    driver: dict[str, str]
    devices: list[ListedDevice]


class ChosenDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    pci_id: str | None = None


class Trial(msgspec.Struct, frozen=True):
    """A run of the small model, confined like an engine."""

    device: str
    resident: bool
    seconds: float
    walls: tuple[Wall, ...]


class Findings(msgspec.Struct):
    """What the child has found so far; a step that failed or was not reached is `None`."""

    step: Step = "library"
    """The last step that began."""
    library: Library | None = None
    device: list[ChosenDevice] | None = None
    trial: Trial | None = None
    plan: Plan | None = None
    """If it does not fit, the error says so."""
    error: WorkerError | None = None
    """The error that ended the step."""


_findings = msgspec.json.Decoder(Findings, dec_hook=from_data)


def ask(
    questions: Questions, *, child: Sequence[str] | None = None, timeout_seconds: float = SECONDS
) -> Findings:
    """Run the child to its end; whatever happens to it is in the findings.

    The child gets the questions as JSON, and writes a line with all its findings whenever a step
    begins and at its end. The last whole line counts.

    Raises `ConfigError` for a path that is not UTF-8.
    """
    check_sendable(questions)
    try:
        ended = subprocess.run(
            child or CHILD,
            input=msgspec.json.encode(questions),
            env=engine_environment(),
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
        output, code, errors = ended.stdout, ended.returncode, ended.stderr
    except subprocess.TimeoutExpired as expired:
        output, code, errors = expired.stdout or b"", None, b""
    *lines, _ = output.split(b"\n")
    findings = Findings()
    try:
        if lines:
            findings = _findings.decode(lines[-1])
        if findings.step == "plan" and isinstance(findings.error, InsufficientVram):
            findings.plan = msgspec.convert(findings.error.details, Plan)
    except (msgspec.DecodeError, ValueError) as error:
        findings.error = BackendMismatch(f"The native library's process sent nonsense: {error}.")
    if code != 0 and findings.error is None:
        findings.error = _death(code, errors, _DOING[findings.step], timeout_seconds)
    return findings


def patience(settings: Settings) -> float:
    """Seconds for the child: a driver that compiles its shaders gets as much time as it would from
    the worker."""
    return max(SECONDS, settings.stall_timeout)


def room_bytes(settings: Settings) -> int:
    """The memory that a model can count on, before there is a model to plan: all of the chosen
    cards', or this machine's up to its limit.

    Free memory would let the choice of a model change from start to start. Starts a child process
    for a GPU. Raises `BackendMismatch` as a start does.
    """
    if not settings.engine.on_gpu:
        return cpu_budget(None).memory_total_bytes
    found = ask(Questions(settings.engine), timeout_seconds=patience(settings))
    if found.error is not None:
        raise found.error
    return sum(each.total_bytes or 0 for each in found.device or ())


def _death(code: int | None, errors: bytes, doing: str, seconds: float) -> BackendMismatch:
    """The error for a child with this exit code, which is `None` if it did not end in time."""
    if code is None:
        return BackendMismatch(
            f"The native library did not answer within {seconds:g} seconds ({doing}); "
            "a driver may hang, or compile for the first time, which takes a longer "
            "--stall-timeout."
        )
    if code == -signal.SIGILL:
        return BackendMismatch(
            f"The native library ended with SIGILL {doing}: the installed wheel uses instructions "
            "that this CPU does not have; install the wheel with all CPU variants.",
            signal="SIGILL",
        )
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    last = f" ({lines[-1].strip()})" if lines else ""
    return BackendMismatch(f"The native library ended with {name} {doing}{last}.", signal=name)
