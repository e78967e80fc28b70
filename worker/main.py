"""The commands `llorch-<backend>`, one for each entry of `BACKENDS`.

Runs a command line. A failure becomes one JSON log line, one sentence on stderr and the contract's
exit code. Runs on the main thread. Nothing heavy is imported before the engine process has been
started, so that both processes import at the same time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from worker.cli import deferred_interrupts, stop_signals
from worker.commands import SUBCOMMANDS

if TYPE_CHECKING:
    from worker.errors import WorkerError
    from worker.settings import Settings
    from worker.supervisor.engine_process import EngineProcess
    from worker.wire.backends import BackendName


def main(backend: BackendName, argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    gc.disable()  # during imports, which make no garbage: collection costs a tenth of them
    name = argv[0] if argv and argv[0] in SUBCOMMANDS else None
    serves = name is None and not {"-h", "--help", "--version"}.intersection(argv)
    try:
        with deferred_interrupts():
            from worker.devices.cpu import instructions
            from worker.errors import WorkerError
            from worker.supervisor.engine_process import EngineProcess
        with contextlib.closing(EngineProcess()) as engine:
            if serves and not instructions.missing():
                with contextlib.suppress(WorkerError):  # the start tries again, and reports why not
                    engine.spawn()
            return _obey(backend, name, argv[1:] if name else argv, engine)
    except KeyboardInterrupt:
        return 0 if name is None else 130


def _obey(
    backend: BackendName, name: str | None, argv: Sequence[str], engine: EngineProcess
) -> int:
    from worker.errors import WorkerError, not_utf8, system_failure
    from worker.observability import logs

    logs.configure()
    try:
        with deferred_interrupts():
            act = _prepared(backend, name, argv, engine)
        gc.enable()
        return act() or 0
    except WorkerError as error:
        failure = error
    except UnicodeEncodeError as error:
        failure = not_utf8(error)
    except BrokenPipeError:  # handled by `cli`
        raise
    except Exception as error:
        refused = system_failure(error)  # a full disk, a missing folder, no more threads
        if refused is None:  # a bug: the log gets the traceback, the user a sentence
            logs.get_logger().error("worker.bug", exc_info=error)
        failure = refused or WorkerError(f"Unexpected {type(error).__name__}: {error}")
    return _report(backend, failure)


def _prepared(
    backend: BackendName, name: str | None, argv: Sequence[str], engine: EngineProcess
) -> Callable[[], int | None]:
    """Import what the command line needs and check its settings; returns a function that runs it.

    Raises `WorkerError` if the command cannot be run.
    """
    from worker.devices.cpu import instructions

    instructions.check()  # must precede NumPy, which would end the process with SIGILL
    from worker.flags import parse_flags
    from worker.installation import check_engine
    from worker.observability import logs
    from worker.settings import Settings

    if name == "health":
        from worker.commands.health import flags_of_first_process

        argv = [*flags_of_first_process(f"llorch-{backend}"), *argv]
    flags = parse_flags(backend, argv, name)
    as_json = bool(flags.pop("json", False))
    settings = Settings.load(backend, flags)
    logs.configure(settings.log_level, settings.log_format, settings.worker_id)
    settings.check_machine()
    if name is None or SUBCOMMANDS[name].needs_engine:
        check_engine(backend)
    if name is not None:
        command = importlib.import_module(f"worker.commands.{name}")
        return partial(command.run, settings, as_json=as_json)
    from worker.lifecycle import run

    return partial(_serve, partial(run, settings, engine, partial(_memory_limit, settings)))


def _serve(serve: Callable[[], None]) -> None:
    try:
        serve()
    finally:
        for number in stop_signals():  # a signal would now change the exit code
            signal.signal(number, signal.SIG_IGN)


def _memory_limit(settings: Settings) -> int:
    from worker.devices.preflight import room_bytes  # only needed for some models

    return room_bytes(settings)


def _report(backend: BackendName, error: WorkerError) -> int:
    """Turn an error into a log line, a sentence and an exit code."""
    from worker.errors import escaped
    from worker.observability import logs

    known = {"code": error.code, "message": error.message, "exit_code": error.exit_code}
    details = {key: value for key, value in error.details.items() if key not in ("errors", "event")}
    logs.get_logger().error("worker.failed", **(details | known))
    with contextlib.suppress(OSError):  # without a reader, the exit code is still reported
        print(f"llorch-{backend}: {escaped(error.message)}", file=sys.stderr, flush=True)
    return error.exit_code
