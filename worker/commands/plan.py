"""`llorch-cpu plan`: shows how much of the device's memory the model would need.

Loads nothing. Runs on the main thread of a command process, which never loads native code itself.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial

from worker.devices import preflight
from worker.engine.text.renderer import check_template, served_templates
from worker.errors import ModelError
from worker.models.load_command import load_command
from worker.models.resolve import ResolvedModel, resolve
from worker.settings import Settings


def run(settings: Settings, *, as_json: bool) -> int:
    """Print the plan.

    Raises:
        InsufficientVram: the model does not fit; the plan is printed first.
        WorkerError: as for a start, except for a port in use: a worker may already be running.
    """
    settings.check_files()
    room = partial(preflight.room_bytes, settings)
    resolved = asyncio.run(resolve(settings, settings.model, room=room))
    check_template_of(resolved, settings)
    load = asyncio.run(load_command(settings, resolved, room=room))
    questions = preflight.Questions(settings.engine, load=load)
    findings = preflight.ask(questions, timeout_seconds=preflight.patience(settings))
    plan, error = findings.plan, findings.error
    if plan is not None:
        print(json.dumps(plan.as_dict(), indent=2) if as_json else plan.as_table(), flush=True)
    if error is not None and findings.step == "plan" and "signal" in error.details:
        raise ModelError(error.message, path=load.model_path)
    if error is not None:
        raise error
    return 0


def check_template_of(resolved: ResolvedModel, settings: Settings) -> None:
    """Raises `ModelError` for a chat template that would make the start fail."""
    for source in served_templates(resolved.header.named_template, settings.engine.chat_template):
        if source:
            check_template(source)
