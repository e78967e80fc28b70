"""The modules that each of the two processes really imports, read from a running worker.

A hook that Python runs at its start records each import of a process. No code of the product knows
of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import StartWorker
from tests.support.worker import WorkerProcess

HOOK = """\
import os, sys
_out = open(os.path.join({folder!r}, str(os.getpid())), "a", buffering=1)
def _note(event, args):
    if event == "import":
        print(args[0], file=_out)
sys.addaudithook(_note)
"""
BEFORE_ANYTHING = {"worker.devices.cpu", "worker.devices.cpu.instructions"}
"""Imported before NumPy, which could crash, to check whether this processor can run the worker."""
NATIVE = {"llama_cpp", "numpy", "gguf"}


@pytest.fixture
def imported(start_worker: StartWorker, tmp_path: Path) -> tuple[set[str], set[str]]:
    """Return the modules of the API process and of the engine process, after some requests."""
    hook, notes = tmp_path / "hook", tmp_path / "notes"
    hook.mkdir()
    notes.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK.format(folder=str(notes)))
    worker = start_worker(env={"PYTHONPATH": f"{hook}:{ROOT}"})
    use(worker)
    pids = worker.pid, worker.engine_pid
    api, engine = (set((notes / str(pid)).read_text().split()) for pid in pids)
    assert worker.stop() == 0
    return api, engine


def use(worker: WorkerProcess) -> None:
    """Send each kind of request once, so that late imports are recorded, too."""
    assert worker.execute("Once upon a time", max_tokens=4).end["tokens_out"] > 0
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert worker.post("/v1/chat/completions", chat).status_code == 200
    assert worker.post("/tokenize", {"content": "Hello"}).status_code == 200
    for path in ("/health", "/ready", "/info", "/metrics", "/openapi.json"):
        assert worker.get(path).status_code == 200


def test_each_process_imports_only_its_rooms(imported: tuple[set[str], set[str]]) -> None:
    api, engine = imported
    assert {"worker.lifecycle", "worker.supervisor.supervisor"} <= api
    assert rooms(api) & {"engine", "llama", "convert"} == set()
    assert {name for name in api if name.startswith("worker.devices.")} <= BEFORE_ANYTHING
    assert {name.partition(".")[0] for name in api} & NATIVE == set()

    assert {"worker.engine.loop", "worker.llama.context"} <= engine
    assert rooms(engine) & {"api", "supervisor", "pool", "lifecycle", "cli", "commands"} == set()
    assert {"uvicorn", "starlette", "httpx"} & engine == set()


def rooms(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("worker.")}
