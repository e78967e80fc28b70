"""`llorch-cpu doctor`: reports whether a worker with these settings would start here, and why not.

Runs on the main thread of a command process. All native code runs in a child (`preflight`), so even
a wheel that crashes yields a report. Nothing is downloaded, and nothing large is converted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from worker.commands.plan import check_template_of
from worker.devices import machine, preflight
from worker.devices.cpu import instructions
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan.plan import Plan, memory_map
from worker.devices.preflight import ChosenDevice, Findings, Questions
from worker.errors import (
    ConfigError,
    DownloadError,
    ModelError,
    WorkerError,
    escaped,
)
from worker.models.adapter import resolve_adapters
from worker.models.checkpoint_files import check_checkpoint
from worker.models.draft import resolve_draft
from worker.models.projector import NONE, resolve_projector
from worker.models.resolve import ResolvedModel, look_up, resolve
from worker.setting_files import certificate_trouble, writable_at
from worker.settings import Settings
from worker.sockets import authority, check_at, listen_on
from worker.wire.messages import LoadModel

_GIB = 1 << 30
_LEAST_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Literal["ok", "unknown", "failed"]
    text: str
    error: WorkerError | None = None
    """The error with which a start would end."""


@dataclass(slots=True)
class Diagnosis:
    command: str
    checks: list[Check] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None

    def ok(self, name: str, text: str) -> None:
        self.checks.append(Check(name, "ok", text))

    def unknown(self, name: str, text: str) -> None:
        self.checks.append(Check(name, "unknown", text))

    def failed(self, name: str, error: WorkerError) -> None:
        self.checks.append(Check(name, "failed", error.message, error))

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Record a `WorkerError` from the block as the check's failure."""
        try:
            yield
        except WorkerError as error:
            self.failed(name, error)

    @property
    def exit_code(self) -> int:
        """0 if a worker would start, otherwise the exit code that it would have."""
        return next((check.error.exit_code for check in self.checks if check.error), 0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "would_start": self.exit_code == 0,
            "exit_code": self.exit_code,
            "checks": [
                {
                    "name": each.name,
                    "status": each.status,
                    "text": each.text,
                    "code": each.error.code if each.error else None,
                }
                for each in self.checks
            ],
            **self.details,
        }

    def as_screen(self) -> str:
        marks = {"ok": "ok     ", "unknown": "unknown", "failed": "FAILED "}
        width = max(len(check.name) for check in self.checks)
        lines = [f"{marks[c.status]}  {c.name:<{width}}  {escaped(c.text)}" for c in self.checks]
        if self.plan is not None:
            for share in self.plan.shares:
                lines += ["", f"memory of {share.device}", *memory_map(share)]
        verdict = "would start" if self.exit_code == 0 else "would not start"
        code = f" (exit code {self.exit_code})" if self.exit_code else ""
        return "\n".join([*lines, "", f"{self.command} {verdict} on this machine{code}."])


def run(settings: Settings, *, as_json: bool) -> int:
    """Print the diagnosis; returns 0 only if a worker would start."""
    found = diagnose(settings)
    print(json.dumps(found.as_dict(), indent=2) if as_json else found.as_screen(), flush=True)
    return found.exit_code


def diagnose(settings: Settings, *, child: Sequence[str] | None = None) -> Diagnosis:
    """Check everything that a start needs, in order."""
    found = Diagnosis(settings.command)
    budget = cpu_budget(settings.engine.threads)
    facts = machine.findings(budget)
    with found.check("machine"):
        try:
            instructions.check()
        except WorkerError as error:
            raise type(error)(f"{facts['machine']}: {error.message}") from None
        found.ok("machine", facts["machine"])
    found.ok("threads", facts["threads"])
    found.ok("memory", facts["memory"])
    files = Diagnosis(found.command)
    cache, cache_fault = _cache(settings)
    questions = _questions(settings, files, cache_fault)
    if cache_fault is None:
        found.ok("cache", cache)
    elif all(check.status == "ok" for check in files.checks):
        found.ok("cache", f"{cache_fault}; these files need none")
    else:  # the check that needs it has failed with the error of a start
        found.checks.append(Check("cache", "failed", cache_fault))
    port: tuple[str, Callable[[], str]] = ("port", partial(_port, settings))
    for name, check in (port, *settings.file_checks()):
        with found.check(name):
            found.ok(name, check())
    if settings.certificate is not None and (why := certificate_trouble(settings.certificate[0])):
        found.unknown("certificate", f"{why}; clients refuse it then")
    limit_s = preflight.patience(settings)
    findings = preflight.ask(questions, child=child, timeout_seconds=limit_s)
    _native_checks(found, findings)
    found.checks += files.checks
    found.plan = findings.plan
    if findings.step == "plan" and findings.error is not None:
        found.failed("plan", findings.error)
    elif found.plan is not None:
        found.ok("plan", _plan_line(found.plan))
    devices = msgspec.to_builtins(findings.device or ())
    found.details = {
        "threads": budget.threads,
        "memory_available_bytes": budget.memory_available_bytes,
        "memory_limit_bytes": budget.memory_limit_bytes,
        "library": msgspec.to_builtins(findings.library),
        "device": devices[0] if len(devices) == 1 else devices or None,
        "trial": msgspec.to_builtins(findings.trial),
        "plan": found.plan.as_dict() if found.plan else None,
        "cache_dir": str(settings.cache_path),
    }
    return found


# --- without native code -----------------------------------------------------------------


def _cache(settings: Settings) -> tuple[str, str | None]:
    """The cache folder, and the reason if it cannot be used."""
    folder = settings.cache_path
    try:
        existing = writable_at(folder)
    except OSError as error:
        return str(folder), f"{folder} cannot be used: {error.strerror}; set --cache-dir"
    free_bytes = shutil.disk_usage(existing).free
    text = f"{folder}, {free_bytes / _GIB:.1f} GiB free"
    return text, None if free_bytes >= _LEAST_CACHE_BYTES else f"{text}; set --cache-dir"


def _port(settings: Settings) -> str:
    if (path := settings.socket_path) is not None:
        check_at(path)
        return f"{path} can be listened on"
    for listener in listen_on(settings.host, settings.port):
        listener.close()
    where = ", ".join(authority(host, settings.port) for host in settings.host)
    return f"{where} is free"


def _questions(settings: Settings, found: Diagnosis, cache_fault: str | None) -> Questions:
    """What the preflight tries in native code, with those of the settings' files that are here."""
    resolved = _model(settings, found, cache_fault)
    adapters, draft, projector = settings.adapters[:0], None, None
    if resolved is None:
        for name, given in (
            *(("adapter", adapter.path) for adapter in settings.adapters),
            ("draft", settings.draft),
            ("projector", settings.mmproj),
        ):
            if given not in (None, NONE):
                text = f"{given} can be checked only once the model is on this machine"
                found.unknown(name, text)
    else:
        model = resolved.header
        with found.check("adapter"):
            adapters = asyncio.run(resolve_adapters(settings.adapters, model, settings.cache_path))
            for adapter in adapters:
                found.ok("adapter", f"{adapter.name} at scale {adapter.scale:g}")
        with found.check("draft"):
            try:
                room = partial(preflight.room_bytes, settings)
                draft = asyncio.run(resolve_draft(settings, model, room=room))
            except DownloadError as error:
                _downloaded_first("draft", str(settings.draft), error, found, cache_fault)
            if draft is not None:
                found.ok("draft", f"{draft.model_ref}: {draft.path}")
        with found.check("projector"):
            projector = resolve_projector(settings, resolved)
            if projector is not None:
                found.ok("projector", projector.path)
    trial = None
    with contextlib.suppress(WorkerError):  # the check of the model or the cache has the reason
        trial = str(asyncio.run(resolve(settings, None)).gguf_path)
    load = None
    if resolved is not None:
        load = LoadModel(
            settings.engine,
            str(resolved.gguf_path),
            resolved.model_ref,
            settings.worker_id,
            adapters=adapters,
            draft=draft,
            projector=projector,
        )
    return Questions(settings.engine, trial, load, str(settings.cache_path / "drivers"))


def _model(settings: Settings, found: Diagnosis, cache_fault: str | None) -> ResolvedModel | None:
    """Check the model; `None` if it fails, or is not on this machine as a GGUF file yet."""
    name = settings.model or "the bundled model"
    with found.check("model"):
        place, _ = look_up(settings.model, settings.models_file)
        if isinstance(place, Path) and place.is_dir():
            check_checkpoint(place)
            if cache_fault is not None:
                raise ModelError(f"{name} must be converted first, which needs a cache")
            found.unknown(
                "model",
                f"{name} would be converted at the first start; its memory is unknown until then",
            )
            return None
        os.environ["HF_HUB_OFFLINE"] = "1"  # a diagnosis downloads nothing
        room = partial(preflight.room_bytes, settings)
        try:
            resolved = asyncio.run(resolve(settings, settings.model, room=room))
        except DownloadError as error:
            _downloaded_first("model", name, error, found, cache_fault)
            return None
        with contextlib.suppress(ConfigError):  # the check of the files has the reason
            check_template_of(resolved, settings)
        found.ok("model", f"{name}: {resolved.gguf_path}")
        return resolved


def _downloaded_first(
    what: str, name: str, error: DownloadError, found: Diagnosis, cache_fault: str | None
) -> None:
    """Record that the first start downloads it; raises `error` if no download would help."""
    if error.details.get("reason") != "offline" or cache_fault is not None:
        raise error
    found.unknown(what, f"{name} is not in the cache yet; the first start downloads it")


# --- with native code --------------------------------------------------------------------


def _native_checks(found: Diagnosis, findings: Findings) -> None:
    if library := findings.library:
        versions, build = library.versions, library.build
        built = f", built for {build['backend']}" if "backend" in build else ""
        commit = build.get("llama_cpp_commit") or versions.get("llama_cpp_commit", "unknown")
        found.ok(
            "library",
            f"llama-cpp-python {versions['llama_cpp_python']}{built}, "
            f"ggml {versions['ggml']} ({commit[:9]})",
        )
        variant = library.cpu_variant or "built in"
        found.ok("cpu variant", f"{variant}: {' '.join(library.cpu_features)}")
        if driver := library.driver:
            found.ok("driver", ", ".join(f"{name} {number}" for name, number in driver.items()))
        for device in library.devices:
            found.ok("found", f"{device.name} ({device.description})")
    for chosen in findings.device or []:
        found.ok("device", _device_line(chosen))
    if trial := findings.trial:
        found.ok("trial", f"a small model loaded, resident and computing in {trial.seconds} s")
        walls = ", ".join(f"{wall.name.replace('_', ' ')}: {wall.summary}" for wall in trial.walls)
        (found.ok if all(wall.holds for wall in trial.walls) else found.unknown)("confined", walls)
    if findings.error is not None and findings.step != "plan":
        found.failed(findings.step, findings.error)


def _device_line(device: ChosenDevice) -> str:
    line = f"{device.name} holds the model"
    if device.total_bytes and device.free_bytes is not None:
        free, total = device.free_bytes / _GIB, device.total_bytes / _GIB
        line += f", {free:.1f} of {total:.1f} GiB free"
        if device.free_bytes == device.total_bytes:
            line += " (or its driver does not report how much is in use)"
    return line


def _plan_line(plan: Plan) -> str:
    needed, available = plan.needed_bytes / _GIB, plan.available_bytes / _GIB
    return f"{needed:.2f} of {available:.2f} GiB for {plan.shape}"
