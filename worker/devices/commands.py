"""The subcommands `plan` and `doctor`: settings in, a screen or JSON out, an exit code back.

Runs on the main thread of a command process, which never loads native code itself.
"""

from __future__ import annotations

import asyncio
import json

from worker.devices import inspection
from worker.devices.doctor import MakeConfig, run_doctor
from worker.devices.inspection import Questions
from worker.devices.plan import Plan
from worker.errors import InsufficientVram, ModelError
from worker.models.resolve import resolve
from worker.settings import Settings

_PLAN_SECONDS = 120.0
"""Of a start-up that takes this long for its plan, something hangs."""


def plan(settings: Settings, make_config: MakeConfig, *, as_json: bool) -> int:
    """Print what the model would take; `make_config` is as for `run_doctor`.

    Raises:
        InsufficientVram: it does not fit; the plan is printed before.
        WorkerError: as the start would.
    """
    resolved = asyncio.run(
        resolve(
            settings.model,
            models_file=settings.models_file,
            cache_dir=settings.cache_path,
            outtype=settings.outtype,
        )
    )
    config = make_config(str(resolved.gguf_path), resolved.model_ref)
    findings = inspection.ask(Questions(config), timeout_seconds=_PLAN_SECONDS)
    error = findings.error
    if isinstance(error, InsufficientVram):
        _print(Plan.from_dict(error.details), as_json)
    elif error is not None and findings.step == "plan" and "signal" in error.details:
        raise ModelError(error.message, path=config.model_path)
    if error is not None:
        raise error
    _print(findings.answers["plan"], as_json)
    return 0


def _print(plan: Plan, as_json: bool) -> None:
    print(json.dumps(plan.as_dict(), indent=2) if as_json else plan.as_table(), flush=True)


def doctor(settings: Settings, make_config: MakeConfig, *, as_json: bool) -> int:
    """Print the diagnosis; 0 only if a worker would start."""
    report = run_doctor(settings, make_config)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.as_screen())
    return report.exit_code
