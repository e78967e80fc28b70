"""What the commands of `pyproject.toml` call. Nothing else is imported before Ctrl-C can wait."""

from __future__ import annotations

import _thread
import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn

_MOMENT_SECONDS = 0.01
"""In which a callback or destructor is over."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """Those that stop a worker. One that `nohup` has started outlives its terminal."""
    ignores_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if ignores_terminal else (signal.SIGHUP,)))


@contextmanager
def interrupted_later() -> Iterator[None]:
    """For imports. A signal that would raise `KeyboardInterrupt` inside the block does so at its
    end: inside of a native module that is being imported, an exception may crash."""
    came: list[int] = []
    handled = [
        each for each in stop_signals() if signal.getsignal(each) is signal.default_int_handler
    ]
    for each in handled:
        signal.signal(each, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _command(module: str, function: str, *first: str) -> NoReturn:
    """Run a function of a module with `first` and the command line, and exit with the code that it
    returns. A reader that leaves, as `head` does, ends the command without a word. A command whose
    output cannot be written has failed."""
    _open_standard_files()
    sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook, _thread.get_ident())
    os.environ["PYTHONSAFEPATH"] = "1"  # what lies where this is started is no module of a child
    # NumPy would have one for each core and use none. Where the system gives it too few, it sends
    # this process a Ctrl-C.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        with interrupted_later():
            run = getattr(importlib.import_module(module), function)
        try:
            code = run(*first, sys.argv[1:])
        finally:
            sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        stop_writing()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:  # of the output: a command tells what else the system refuses it
        stop_writing()
        with suppress(OSError):
            name = os.path.basename(sys.argv[0])
            print(f"{name}: {error.strerror or error}", file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # Python would try again, and exit with 120
            stop_writing(2)


def _open_standard_files() -> None:
    """Open standard files that the parent closed; otherwise a socket, or a file that is written,
    would take their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)  # the engine process logs there, too
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # a plan's bars are no reason to show no plan


def _interrupt_again(
    tell: Callable[[sys.UnraisableHookArgs], object],
    main_thread: int,
    lost: sys.UnraisableHookArgs,
) -> None:
    """Have a Ctrl-C that came inside of a callback or destructor, which raise nothing, come once
    more. Python shows its trace and goes on."""
    # Behind a shell's `&`, Ctrl-C itself is ignored; an event loop has a handler of its own.
    numbers = [each for each in stop_signals() if callable(signal.getsignal(each))]
    if not numbers or not issubclass(lost.exc_type, KeyboardInterrupt):
        tell(lost)
        return

    def interrupt() -> None:
        time.sleep(_MOMENT_SECONDS)
        if callable(signal.getsignal(numbers[0])):
            signal.pthread_kill(main_thread, numbers[0])  # which also ends a wait

    with suppress(RuntimeError):  # no thread is left
        _thread.start_new_thread(interrupt, ())


def stop_writing(number: int = 1) -> None:
    """Have what is still to be written to stdout, or to the file of that number, go nowhere: it
    cannot be written where it was."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


cpu = partial(_command, "worker.main", "main", "cpu")
cuda = partial(_command, "worker.main", "main", "cuda")
vulkan = partial(_command, "worker.main", "main", "vulkan")
metal = partial(_command, "worker.main", "main", "metal")
accelerate = partial(_command, "worker.main", "main", "accelerate")
convert = partial(_command, "worker.commands.convert", "run")
ray = partial(_command, "worker.fleet.command", "run")
worker = partial(_command, "worker.commands.install_engine", "run")
