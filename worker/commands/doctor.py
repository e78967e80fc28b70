"""`llorch-cpu doctor`: tells whether a worker with these settings would start here, and if not,
why.

Runs on the main thread of a command process. Everything native happens in a child (`preflight`), so
even a wheel that crashes gives a report. Nothing is downloaded, and nothing large is converted.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.devices import machine, preflight
from worker.devices.cpu import instructions
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan.plan import Plan
from worker.devices.preflight import Findings, Questions
from worker.errors import BackendMismatch, DownloadError, InsufficientVram, PortInUse, WorkerError
from worker.models import reference
from worker.models.adapter import resolve_adapter
from worker.models.checkpoint_files import check_checkpoint
from worker.models.draft import resolve_draft
from worker.models.resolve import resolve_for
from worker.settings import Settings
from worker.wire.engine_settings import Adapter
from worker.wire.messages import DraftFile

_GIB = 1 << 30
_LEAST_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Literal["ok", "unknown", "failed"]
    text: str
    code: str | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class DoctorReport:
    command: str
    checks: tuple[Check, ...]
    details: dict[str, Any]
    plan: Plan | None = None

    @property
    def exit_code(self) -> int:
        """0 if a worker would start, otherwise the exit code that it would have."""
        return next((check.exit_code for check in self.checks if check.exit_code), 0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "would_start": self.exit_code == 0,
            "exit_code": self.exit_code,
            "checks": [
                {"name": c.name, "status": c.status, "text": c.text, "code": c.code}
                for c in self.checks
            ],
            **self.details,
        }

    def as_screen(self) -> str:
        marks = {"ok": "ok     ", "unknown": "unknown", "failed": "FAILED "}
        width = max(len(check.name) for check in self.checks)
        lines = [f"{marks[c.status]}  {c.name:<{width}}  {c.text}" for c in self.checks]
        if self.plan is not None:
            lines += ["", f"memory of {self.plan.device}", *self.plan.memory_map()]
        verdict = "would start" if self.exit_code == 0 else "would not start"
        code = f" (exit code {self.exit_code})" if self.exit_code else ""
        return "\n".join([*lines, "", f"{self.command} {verdict} on this machine{code}."])


def run(settings: Settings, *, as_json: bool) -> int:
    """Print the diagnosis; returns 0 only if a worker would start."""
    report = diagnose(settings)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_screen(), flush=True)
    return report.exit_code


def diagnose(
    settings: Settings,
    *,
    child: Sequence[str] | None = None,
    root: Path = Path("/"),
) -> DoctorReport:
    """Check everything that a start needs, in order."""
    budget = cpu_budget(settings.engine.threads, root)
    limit = budget.memory_limit_bytes
    checks = [
        _machine(root),
        Check("threads", "ok", budget.derivation),
        Check(
            "memory",
            "ok",
            f"{budget.memory_available_bytes / _GIB:.1f} GiB available "
            f"({budget.memory_derivation}), "
            + (f"limit {limit / _GIB:.1f} GiB" if limit else "no limit set"),
        ),
        _cache(settings),
        _port(settings),
    ]
    model_check, model_path = _model(settings)
    adapter_check, adapter = _adapter(settings, model_path)
    draft_check, draft = _draft(settings, model_path)
    findings = _ask_native_code(settings, model_path, adapter, draft, child)
    checks += _native_checks(settings, findings)
    checks.append(model_check)
    checks += [check for check in (adapter_check, draft_check) if check is not None]
    if "plan" in findings.answers or findings.step == "plan":
        checks.append(_plan_check(findings))
    plan = _plan(findings)
    details = {
        "threads": budget.threads,
        "memory_available_bytes": budget.memory_available_bytes,
        "memory_limit_bytes": limit,
        "library": findings.answers.get("library"),
        "device": findings.answers.get("device"),
        "trial": findings.answers.get("trial"),
        "plan": plan.as_dict() if plan else None,
        "cache_dir": str(settings.cache_path),
    }
    return DoctorReport(f"llorch-{settings.backend}", tuple(checks), details, plan)


# --- without native code -----------------------------------------------------------------


def _failed(name: str, error: WorkerError) -> Check:
    return Check(name, "failed", error.message, error.code, error.exit_code)


def _machine(root: Path) -> Check:
    text = f"{platform.platform()}, {machine.cpu_model(root)}"
    try:
        instructions.check()
    except BackendMismatch as error:
        return Check("machine", "failed", f"{text}: {error.message}", error.code, error.exit_code)
    return Check("machine", "ok", text)


def _cache(settings: Settings) -> Check:
    """Check the cache folder; until the first start makes it, its nearest parent is checked."""
    folder = settings.cache_path
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        text = f"{folder}: {existing} cannot be written to; set --cache-dir"
        return Check("cache", "failed", text, "DOWNLOAD_FAILED", DownloadError.exit_code)
    free_bytes = shutil.disk_usage(existing).free
    text = f"{folder}, {free_bytes / _GIB:.1f} GiB free"
    if free_bytes < _LEAST_CACHE_BYTES:
        return Check("cache", "failed", text, "DOWNLOAD_FAILED", DownloadError.exit_code)
    return Check("cache", "ok", text)


def _port(settings: Settings) -> Check:
    where = f"{settings.host}:{settings.port}"
    try:
        [(family, kind, *_, address), *_] = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        text = f"{where} cannot be listened on: {error.strerror}"
        return Check("port", "failed", text, "PORT_IN_USE", PortInUse.exit_code)
    return Check("port", "ok", f"{where} is free")


def _model(settings: Settings) -> tuple[Check, str | None]:
    """Check the model, as far as it is on this machine; returns its file if there is one."""
    name = settings.model or "the bundled model"
    try:
        folder = _checkpoint_folder(settings)
        if folder is not None:
            check_checkpoint(folder)
            text = f"{name} would be converted by the first start; its memory is not known before"
            return Check("model", "unknown", text), None
        os.environ["HF_HUB_OFFLINE"] = "1"  # a diagnosis downloads nothing
        path = str(asyncio.run(resolve_for(settings, settings.model)).gguf_path)
    except DownloadError as error:
        if error.details.get("reason") == "offline":
            text = f"{name} is not in the cache yet; the first start downloads it"
            return Check("model", "unknown", text), None
        return _failed("model", error), None
    except WorkerError as error:
        return _failed("model", error), None
    return Check("model", "ok", f"{name}: {path}"), path


def _adapter(settings: Settings, model_path: str | None) -> tuple[Check | None, Adapter | None]:
    """Check the chosen adapter, and that it fits the model if that is here."""
    if settings.lora is None:
        return None, None
    if model_path is None:
        text = f"{settings.lora} is held against the model once that is on this machine"
        return Check("adapter", "unknown", text), None
    try:
        found = resolve_adapter(settings.lora, Path(model_path), settings.cache_path)
        adapter = asyncio.run(found)
    except WorkerError as error:
        return _failed("adapter", error), None
    assert adapter is not None, "one was asked for"
    return Check("adapter", "ok", f"{adapter.name} at scale {adapter.scale:g}"), adapter


def _draft(settings: Settings, model_path: str | None) -> tuple[Check | None, DraftFile | None]:
    """The draft model that was asked for, held against the model if that is here."""
    if settings.draft is None:
        return None, None
    if model_path is None:
        text = f"{settings.draft} is held against the model once that is on this machine"
        return Check("draft", "unknown", text), None
    try:
        draft = asyncio.run(resolve_draft(settings, Path(model_path)))
    except WorkerError as error:
        return _failed("draft", error), None
    assert draft is not None, "one was asked for"
    return Check("draft", "ok", f"{draft.model_ref}: {draft.path}"), draft


def _checkpoint_folder(settings: Settings) -> Path | None:
    parsed = reference.parse(settings.model) if settings.model else None
    path = parsed.path if isinstance(parsed, reference.PathReference) else None
    return path if path is not None and path.is_dir() else None


# --- with native code --------------------------------------------------------------------


def _ask_native_code(
    settings: Settings,
    model_path: str | None,
    adapter: Adapter | None,
    draft: DraftFile | None,
    child: Sequence[str] | None,
) -> Findings:
    try:
        trial_path = str(asyncio.run(resolve_for(settings, None)).gguf_path)
    except WorkerError:
        trial_path = None  # the check of the model or the cache has reported why
    questions = Questions(
        settings.engine,
        trial_path,
        model_path,
        settings.model or "bundled",
        adapter.size_bytes if adapter is not None else 0,
        draft.path if draft is not None else None,
    )
    return preflight.ask(questions, child=child)


def _native_checks(settings: Settings, findings: Findings) -> list[Check]:
    answers = findings.answers
    checks = []
    if library := answers.get("library"):
        versions, build = library["versions"], library["build"]
        built = f", built for {build['backend']}" if "backend" in build else ""
        checks.append(
            Check(
                "library",
                "ok",
                f"llama-cpp-python {versions['llama_cpp_python']}{built}, "
                f"ggml {versions['ggml']} ({versions['llama_cpp_commit']})",
            )
        )
        variant = library["cpu_variant"] or "built in"
        features = " ".join(library["cpu_features"])
        checks.append(Check("cpu variant", "ok", f"{variant}: {features}"))
        if library["driver"]:
            text = ", ".join(f"{name} {number}" for name, number in library["driver"].items())
            checks.append(Check("driver", "ok", text))
        for device in library["devices"]:
            checks.append(Check("found", "ok", f"{device['name']} ({device['description']})"))
    if device := answers.get("device"):
        checks.append(Check("device", "ok", _device_line(device)))
    if trial := answers.get("trial"):
        text = f"a small model loaded, resident and computed with in {trial['seconds']} s"
        checks.append(Check("trial", "ok", text))
    if findings.error is not None and findings.step != "plan":
        checks.append(_failed(findings.step, findings.error))
    return checks


def _device_line(device: dict[str, Any]) -> str:
    line = f"{device['name']} holds the model"
    if device.get("total_bytes"):
        free, total = device["free_bytes"] / _GIB, device["total_bytes"] / _GIB
        line += f", {free:.1f} of {total:.1f} GiB free"
    return line


def _plan_check(findings: Findings) -> Check:
    if findings.error is not None:
        return _failed("plan", findings.error)
    plan: Plan = findings.answers["plan"]
    return Check(
        "plan",
        "ok",
        f"{plan.needed_bytes / _GIB:.2f} of {plan.available_bytes / _GIB:.2f} GiB for "
        f"{plan.slots} slots of {plan.context_length:,} tokens"
        + (f" (of the model's {plan.trained_context_length:,})" if plan.capped else ""),
    )


def _plan(findings: Findings) -> Plan | None:
    """The plan, even if it does not fit."""
    if isinstance(findings.error, InsufficientVram):
        return Plan.from_dict(findings.error.details)
    plan: Plan | None = findings.answers.get("plan")
    return plan
