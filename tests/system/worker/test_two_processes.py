"""What each of the two processes really imports, read from a running worker.

Python itself is asked: a hook that it runs at its start writes each import of a process down. No
code of the product knows of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartWorker
from tests.support.worker import ROOT, WorkerProcess

HOOK = """\
import os, sys
_out = open(os.path.join({folder!r}, str(os.getpid())), "a", buffering=1)
def _note(event, args):
    if event == "import":
        print(args[0], file=_out)
sys.addaudithook(_note)
"""
BEFORE_ANYTHING = {"worker.devices.cpu", "worker.devices.cpu.instructions"}
"""Whether this processor can run the worker at all is asked before NumPy could crash on it."""
NATIVE = {"llama_cpp", "numpy", "gguf"}


@pytest.fixture
def imported(start_worker: StartWorker, tmp_path: Path) -> tuple[set[str], set[str]]:
    """The modules of the API process and of the engine process, after some requests."""
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
    """Each kind of request once, so that what is imported late is seen as well."""
    assert worker.execute("Once upon a time", max_tokens=4).end["tokens_out"] > 0
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert worker.post("/v1/chat/completions", chat).status_code == 200
    assert worker.post("/tokenize", {"content": "Hello"}).status_code == 200
    for path in ("/health", "/ready", "/info", "/metrics", "/openapi.json"):
        assert worker.get(path).status_code == 200


def test_each_process_keeps_to_its_rooms(imported: tuple[set[str], set[str]]) -> None:
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
