"""How much memory a model may count on, before there is a model to plan."""

from __future__ import annotations

from worker.devices import preflight
from worker.devices.cpu.budget import cpu_budget
from worker.wire.engine_settings import EngineSettings


def room_bytes(settings: EngineSettings) -> int:
    """All of the chosen cards' memory, or of this machine's up to its limit.

    What is free would let the choice change from start to start. Starts a child process for a GPU.
    Raises `BackendMismatch` as a start does.
    """
    if not settings.on_gpu:
        return cpu_budget(None).memory_total_bytes
    found = preflight.ask(preflight.Questions(settings))
    if found.error is not None:
        raise found.error
    return sum(each.total_bytes or 0 for each in found.device or ())
