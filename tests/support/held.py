"""Processes that stop at a chosen point, so that a test need not hit that moment by timing.

Python itself runs the hook at its start; no code of the product knows of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.support import sse
from tests.support.worker import WorkerProcess

N_STEPS = 8
"""Batches that a held engine still computes: the prompt's, and some tokens of the stream. Touching
the file lets it compute as many more."""

_ENGINE = """\
import os, sys, time
def touched():
    try:
        return os.stat({path!r}).st_mtime_ns
    except FileNotFoundError:
        return None
if "--fd" in sys.orig_argv:  # an engine, be it one of the tests
    while touched() is not None:
        time.sleep(0.02)
    from worker.llama.context import Context
    plain, n_left, seen = Context.decode, 0, None
    def decode(context, batch):
        global n_left, seen
        while (now := touched()) is not None:
            if now != seen:
                n_left, seen = {n_steps}, now
            if n_left > 0:
                break
            time.sleep(0.02)
        n_left -= 1
        return plain(context, batch)
    Context.decode = decode
"""
_RENAME = """\
import os, signal, sys
def hook(event, args):
    if event == "os.rename" and os.fspath(args[1]) == {path!r}:
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(hook)
"""


def engines_held_by(path: Path) -> dict[str, str]:
    """Variables of a worker whose engines wait while this file exists.

    No engine starts, and a running one computes only `N_STEPS` more batches: this way tests can
    act in the middle of a stream on any machine, however fast it is.
    """
    return _running(_ENGINE, path, path.parent)


def stopped_before_renaming_to(path: Path, folder: Path) -> dict[str, str]:
    """Variables of a process that stops itself, as by SIGSTOP, before it renames a file to that
    name.

    The hook is kept in the folder.
    """
    return _running(_RENAME, path, folder)


@dataclass(slots=True)
class Reading:
    chunks: Iterator[bytes]
    seen: bytes = b""

    def rest(self) -> sse.Stream:
        """Read the rest of the stream."""
        return sse.collect([self.seen, *self.chunks])


@contextmanager
def holding(hold: Path) -> Iterator[None]:
    """Within this block engines compute only `N_STEPS` batches, unless the file is removed."""
    hold.touch()
    try:
        yield
    finally:
        hold.unlink(missing_ok=True)


@contextmanager
def mid_stream(worker: WorkerProcess, prompt: str, **fields: Any) -> Iterator[Reading]:
    """A stream of more than `N_STEPS` tokens, between its first and its last token.

    The worker needs the variables of `engines_held_by(worker.hold)`. It continues when the file is
    removed, at the latest after the block.
    """
    with holding(worker.hold), worker.streaming(prompt, **fields) as response:
        reading = Reading(response.iter_raw())
        while b"event: token" not in reading.seen:
            reading.seen += next(reading.chunks)
        yield reading


def _running(code: str, path: Path, folder: Path) -> dict[str, str]:
    folder = folder / "at-start"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code.format(path=str(path), n_steps=N_STEPS))
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
