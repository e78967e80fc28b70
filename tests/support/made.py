"""Files that are slow to make and always the same, which the processes of a test run share."""

from __future__ import annotations

import atexit
import functools
import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

from filelock import FileLock

from worker.models.scratch import Scratch

P = ParamSpec("P")
_FOLDER = "FOLDER_OF_THE_TEST_RUN"


def shared_folder() -> Path:
    """Return the folder of this run. The first process that asks creates it, and removes it at the
    end (or else the next run does); its child processes find it in their environment."""
    if _FOLDER not in os.environ:
        scratch = Scratch(None)
        os.environ[_FOLDER] = str(scratch.path)
        atexit.register(scratch.cleanup)
    return Path(os.environ[_FOLDER])


def made_once(name: str) -> Callable[[Callable[Concatenate[Path, P], object]], Callable[P, Path]]:
    """Decorate a function that writes a file: a run calls it once for the same arguments, in the
    first process that needs the file, which nobody may change. `name` is the file's name, with the
    names of arguments in braces."""

    def once(write: Callable[Concatenate[Path, P], object]) -> Callable[P, Path]:
        signature = inspect.signature(write)

        @functools.wraps(write)
        def path_of(*args: P.args, **kwargs: P.kwargs) -> Path:
            bound = signature.bind(Path(), *args, **kwargs)
            bound.apply_defaults()
            _, *arguments = bound.arguments.items()
            key = hashlib.sha256(repr((write.__qualname__, arguments)).encode()).hexdigest()
            folder, file_name = shared_folder() / key, name.format(**dict(arguments))
            with FileLock(f"{folder}.lock"):
                if not folder.exists():
                    unfinished = Path(tempfile.mkdtemp(dir=shared_folder()))
                    write(unfinished / file_name, *args, **kwargs)
                    unfinished.rename(folder)
            return folder / file_name

        return path_of

    return once
