"""The entry points in `pyproject.toml`. They import nothing else before they can defer Ctrl-C."""

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
from types import FrameType
from typing import NoReturn

_RETURN_SECONDS = 0.01
"""Time for a callback or destructor to return before Ctrl-C is raised again."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a worker. `nohup` ignores SIGHUP, so that its command outlives the
    terminal; then SIGHUP is not among them."""
    ignores_terminal = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if ignores_terminal else (signal.SIGHUP,)))


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer `KeyboardInterrupt` to the end of the block. For imports: an exception while a native
    module initialises may crash the process."""
    received: list[int] = []
    deferred = {
        each: handler
        for each in stop_signals()
        if (handler := signal.getsignal(each)) in (signal.default_int_handler, _like_interrupt)
    }
    for each in deferred:
        signal.signal(each, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for each, handler in deferred.items():
            signal.signal(each, handler)
    if received:
        raise KeyboardInterrupt


def _like_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal like Ctrl-C, which cancels the task of an event loop. A shell's `&` ignores
    Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def _command(module: str, function: str, *first: str) -> NoReturn:
    """Call `function` of `module` with `first` and the command line; exit with the code it returns.
    The command ends silently if the reader of stdout leaves, as `head` does, and with exit code 1
    if its output cannot be written for another reason."""
    # All act like Ctrl-C, until a command handles them otherwise. The kernel drops those that a
    # container's first process does not handle yet, so this precedes all other imports.
    for each in set(stop_signals()) - {signal.SIGINT}:
        signal.signal(each, _like_interrupt)
    _open_standard_files()
    sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook, _thread.get_ident())
    os.environ["PYTHONSAFEPATH"] = "1"  # children import nothing from the working folder
    # NumPy's OpenBLAS would start a thread per core, which nothing uses, and raise SIGINT in this
    # process if the system refused one.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        with deferred_interrupts():
            run = getattr(importlib.import_module(module), function)
        try:
            code = run(*first, sys.argv[1:])
        finally:
            sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        discard_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:  # from writing output: commands report all other system errors
        _fail(error.strerror or str(error))
    except (ImportError, MemoryError) as error:  # while a command is imported
        from worker.errors import system_failure

        if (failure := system_failure(error)) is None:
            raise
        _fail(failure.message)
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # at exit, Python would flush again, fail, and exit with 120
            discard_output(2)


def _fail(why: str) -> NoReturn:
    discard_output()
    with suppress(OSError):
        print(f"{os.path.basename(sys.argv[0])}: {why}", file=sys.stderr, flush=True)
    sys.exit(1)


def _open_standard_files() -> None:
    """Open `/dev/null` for each standard file that the parent closed; otherwise a socket or an
    output file would get its descriptor."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)  # the engine process logs to it, too
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="replace")  # a plan's bars become `?` instead of an error


def _interrupt_again(
    report: Callable[[sys.UnraisableHookArgs], object],
    main_thread: int,
    lost: sys.UnraisableHookArgs,
) -> None:
    """Repeat a Ctrl-C that arrived inside a callback or destructor, where Python only prints the
    exception and continues. `report` is called for all other exceptions."""
    # Whichever is handled: a shell's `&` ignores SIGINT, and event loops have their own handlers.
    numbers = [each for each in stop_signals() if callable(signal.getsignal(each))]
    if not numbers or not issubclass(lost.exc_type, KeyboardInterrupt):
        report(lost)
        return

    def interrupt() -> None:
        time.sleep(_RETURN_SECONDS)
        if callable(signal.getsignal(numbers[0])):
            signal.pthread_kill(main_thread, numbers[0])  # also ends a blocking call

    with suppress(RuntimeError):  # the system refuses a thread
        _thread.start_new_thread(interrupt, ())


def discard_output(number: int = 1) -> None:
    """Discard what is buffered for stdout, or another descriptor, and cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


cpu = partial(_command, "worker.main", "main", "cpu")
cuda = partial(_command, "worker.main", "main", "cuda")
vulkan = partial(_command, "worker.main", "main", "vulkan")
metal = partial(_command, "worker.main", "main", "metal")
accelerate = partial(_command, "worker.main", "main", "accelerate")
convert = partial(_command, "worker.commands.convert", "run")
ray = partial(_command, "worker.fleet.command", "run")
worker = partial(_command, "worker.commands.install_engine", "run")
