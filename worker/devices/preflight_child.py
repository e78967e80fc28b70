"""The child of `preflight.ask`: tries wheel, device and model, and sends each answer at once.

It is a process of its own, because any of these steps may end it.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from worker.devices import machine, select
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan import memory
from worker.devices.plan.plan import Plan
from worker.devices.preflight import Questions, StepAnswered, StepBegun, StepFailed
from worker.devices.residency import proof as residency
from worker.errors import WorkerError
from worker.llama import library, warmup
from worker.llama.context import Context
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import read_header
from worker.wire.engine_settings import EngineSettings


def main() -> None:
    # Native code may print; its output must not mix with the messages.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions: Questions = pickle.load(sys.stdin.buffer)

    def send(message: StepBegun | StepAnswered | StepFailed) -> None:
        pickle.dump(message, channel)
        channel.flush()

    try:
        for step, answer in _steps(questions):
            send(StepBegun(step))
            send(StepAnswered(step, answer()))
    except WorkerError as error:
        send(StepFailed(error))
    # An orderly teardown of native code proves nothing and may fail.
    os._exit(0)


def _steps(questions: Questions) -> Iterator[tuple[str, Callable[[], Any]]]:
    settings, trial_path, plan_path = questions.settings, questions.trial_path, questions.plan_path
    yield "library", lambda: _library(settings)
    yield "device", lambda: _device(settings)
    if trial_path is not None:
        modest = dataclasses.replace(
            settings, slots=1, context_length=256, kv_type="f16", flash_attention="auto"
        )
        yield "trial", lambda: _trial(modest, trial_path)
    if plan_path is not None:
        yield "plan", lambda: _plan(questions, plan_path)


def _library(settings: EngineSettings) -> dict[str, Any]:
    select.hide_other_cards(settings)
    library.load()
    return {
        "versions": library.versions(),
        "build": select.wheel_stamp(),
        "cpu_variant": select.cpu_variant(),
        "cpu_features": machine.cpu_features(library.system_info()),
        "driver": machine.driver_versions(),
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "kind": device.kind,
                "backend": device.registry,
            }
            for device in library.devices()
        ],
    }


def _device(settings: EngineSettings) -> dict[str, Any]:
    selected = select.select_device(settings)
    found: dict[str, Any] = {"name": selected.name}
    if selected.device is not None:
        found |= dataclasses.asdict(library.memory_of(selected.device))
    return found


def _trial(settings: EngineSettings, path: str) -> dict[str, Any]:
    """Do everything that a start does, on the small model."""
    began = time.monotonic()
    selected = select.select_device(settings)
    header = read_header(path)
    placement = residency.tensor_placement(selected, header)
    options = LoadOptions(
        device=selected.device,
        mmap=selected.device is None,
        mlock=settings.mlock,
        tensor_placement=placement,
    )
    model = Model(path, options)
    context = Context(
        model,
        memory.context_options(
            settings, memory.a_part_each(settings, 256), threads=1, embeds=False
        ),
    )
    proof = residency.prove(model, context, selected, header, locked=settings.mlock)
    warmup.warm_up(model, context)
    return {
        "device": proof.device,
        "resident": proof.resident,
        "seconds": round(time.monotonic() - began, 2),
    }


def _plan(questions: Questions, path: str) -> Plan:
    settings = questions.settings
    selected = select.select_device(settings)
    budget = cpu_budget(settings.threads)
    draft = read_header(questions.draft_path) if questions.draft_path else None
    return memory.plan(
        read_header(path),
        settings,
        selected.device,
        budget,
        questions.model_ref,
        memory.Beside(questions.adapter_bytes, draft),
    )


if __name__ == "__main__":
    main()
