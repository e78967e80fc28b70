"""Processes that stand still at a chosen moment, so that a test need not hit that moment in time.

Python itself runs the code at its start; no code of the product knows of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.worker import ROOT

_ENGINE = """\
import os, sys, time
while "worker.engine.process" in sys.orig_argv and os.path.exists({path!r}):
    time.sleep(0.02)
"""
_RENAME = """\
import os, signal, sys
def hook(event, args):
    if event == "os.rename" and os.fspath(args[1]) == {path!r}:
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(hook)
"""


def engines_held_by(path: Path) -> dict[str, str]:
    """Variables of a worker whose engines do not begin to start while there is such a file."""
    return _running(_ENGINE, path, path.parent)


def stopped_before_renaming_to(path: Path, folder: Path) -> dict[str, str]:
    """Variables of a process that stops itself, as by SIGSTOP, before it gives a file that name.

    The hook is kept in the folder.
    """
    return _running(_RENAME, path, folder)


def _running(code: str, path: Path, folder: Path) -> dict[str, str]:
    folder = folder / "at-start"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code.format(path=str(path)))
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
