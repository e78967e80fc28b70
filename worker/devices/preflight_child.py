"""The child of `preflight.ask`: tries wheel, device and model, and reports what it finds.

It is a process of its own, because any of these steps may end it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from worker.confinement.walls import Walls
from worker.devices import machine, select
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan import memory
from worker.devices.plan.cells import a_part_each, context_options
from worker.devices.plan.placement import load_options
from worker.devices.plan.plan import Plan
from worker.devices.preflight import (
    ChosenDevice,
    Findings,
    Library,
    ListedDevice,
    Questions,
    Step,
    Trial,
)
from worker.devices.residency import proof as residency
from worker.errors import ModelError, WorkerError
from worker.llama import library, warmup
from worker.llama.context import Context
from worker.llama.model import Model
from worker.models.control_vectors import read_directions
from worker.models.gguf.header import current_header, parts_beside, read_header
from worker.models.gguf.servable import check_overridden
from worker.wire.codec import to_data


def main() -> None:
    # Native code may print; its output must not mix with the findings.
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=Questions)
    findings = Findings()
    walls = _walls(questions)

    def report() -> None:
        channel.write(msgspec.json.encode(findings, enc_hook=to_data) + b"\n")
        channel.flush()

    def report_abort(message: str) -> None:
        findings.error = ModelError(library.sentence_of_abort("llama.cpp gave {} up", message))
        report()

    try:
        for step in questions.steps:
            findings.step = step
            report()
            if step == "plan":  # not earlier: this loads the library
                library.on_abort(report_abort)
            setattr(findings, step, _STEPS[step](questions, walls))
    except WorkerError as error:
        findings.error = error
    report()
    # An orderly teardown of native code proves nothing and may fail.
    os._exit(0)


def _walls(questions: Questions) -> Walls:
    models = [Path(questions.trial_path)] if questions.trial_path is not None else []
    models += questions.load.paths if questions.load is not None else []
    files = [part for path in models for part in parts_beside(path)]
    files += [Path(os.path.expanduser(each.path)) for each in questions.settings.control_vectors]
    cache = Path(questions.driver_cache) if questions.driver_cache is not None else None
    return Walls(questions.settings, files, driver_cache=cache)


def _library(questions: Questions, _walls: Walls) -> Library:
    select.hide_other_cards(questions.settings)
    library.load()
    return Library(
        versions=library.versions(),
        build=select.wheel_stamp(),
        cpu_variant=select.cpu_variant(),
        cpu_features=machine.cpu_features(library.system_info()),
        driver=machine.driver_versions(),
        devices=[
            ListedDevice(device.name, device.description, device.kind, device.registry)
            for device in library.devices()
        ],
    )


def _device(questions: Questions, _walls: Walls) -> list[ChosenDevice]:
    selected = select.select_device(questions.settings)
    if not selected.is_gpu:
        return [ChosenDevice("CPU")]
    found = [(device.name, library.properties_of(device)) for device in selected.devices]
    return [ChosenDevice(name, p.free_bytes, p.total_bytes, p.pci_id) for name, p in found]


def _trial(questions: Questions, walls: Walls) -> Trial:
    """Do everything that a start does, on the small model."""
    began = time.monotonic()
    path = questions.trial_path
    assert path is not None, "otherwise the step is skipped"
    settings = dataclasses.replace(
        questions.settings,
        slots=1,
        context_length=256,
        kv_type="f16",
        kv_type_k=None,
        kv_type_v=None,
        flash_attention="auto",
    )
    selected = select.select_device(settings).first
    header = read_header(path)
    options = load_options(header, selected.devices, mmap=not selected.is_gpu, mlock=settings.mlock)
    model = Model(path, options)
    cells = a_part_each(settings, 256)
    context = Context(model, context_options(settings, cells, threads=1, embeds=False))
    proof = residency.prove(context, selected, header)
    closed = walls.close()
    warmup.warm_up(context)
    return Trial(selected.names[0], proof.resident, round(time.monotonic() - began, 2), closed)


def _plan(questions: Questions, _walls: Walls) -> Plan:
    settings, load = questions.settings, questions.load
    assert load is not None, "otherwise the step is skipped"
    selected = select.select_device(settings)
    header = current_header(load.header, Path(load.model_path))
    header = check_overridden(header, settings.overrides)
    read_directions(settings, header)  # raises if they are missing or do not fit
    return memory.plan_start(load, header, selected.devices, cpu_budget(settings.threads))


_STEPS: dict[Step, Callable[[Questions, Walls], Any]] = {
    "library": _library,
    "device": _device,
    "trial": _trial,
    "plan": _plan,
}

if __name__ == "__main__":
    main()
