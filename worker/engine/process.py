"""The engine process: its entry point and its threads.

The main thread loads the model (`start`) and then becomes the engine thread; another thread
receives commands. The pipe ends when the parent is gone; this process then exits at once, whatever
native code is doing.

NOTE: every native computation happens on the main thread. OpenMP keeps a pool of threads for each
thread that computes. With two pools it counts more threads than processors and no longer spins at
its barriers, of which a decode has hundreds.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import threading
import traceback
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from worker.background import die_with_parent
from worker.errors import EngineCrashed, WorkerError, system_failure
from worker.observability.logs import configure, get_logger
from worker.wire.black_box import BlackBox
from worker.wire.messages import EngineFailed, LoadModel, Ready, Stop
from worker.wire.transport import SyncChannel

if TYPE_CHECKING:
    from worker.engine.intake import Intake
    from worker.engine.loop import Loop
    from worker.engine.outbox import Outbox
    from worker.llama.library import LogLevel

log = get_logger()

_EXPECTED_WARNINGS = (
    *("training context overflow", "dummy tokens"),
    *("compute status: 1", "failed with error 1", "removing memory module entries"),
    *("failed to decode, ret = 2", "failed to find a memory slot"),
    "failed to prepare attention ubatches",
)
"""Parts of llama.cpp's warnings about what is expected: a pool that is larger than one sequence, a
plan without a vocabulary, a step that a cancel ended, a step for which the loop then makes room."""


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="worker.engine.process")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the parent")
    parser.add_argument("--black-box", type=int, required=True, help="the black box's file")
    # The parent decides when to stop; a service manager may signal both processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # On an abort, ggml would run a debugger first, and the requests in flight would wait for it.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    options = parser.parse_args()
    channel = SyncChannel(socket.socket(fileno=options.fd))
    configure()
    try:
        _serve(channel, BlackBox(options.black_box))
    except WorkerError as error:
        channel.send([EngineFailed(error)])
        os._exit(error.exit_code)
    except Exception as error:  # a fault of the system (no thread is left) or of the worker itself
        log.exception("engine.start_failed")
        what = str(system_failure(error) or f"{type(error).__name__}: {error}").removesuffix(".")
        channel.send([EngineFailed(WorkerError(f"The engine's start failed: {what}."))])
        os._exit(WorkerError.exit_code)


def _serve(channel: SyncChannel, black_box: BlackBox) -> None:
    # Only here, so that the parent learns why a library cannot be loaded; and before the command
    # comes, since the parent imports at the same time.
    from worker.engine.media.decoder import decoder
    from worker.engine.start import report_abort, start, walls_for
    from worker.engine.text.renderer import renderer
    from worker.llama import library

    library.bindings()
    config = channel.recv()
    if not isinstance(config, LoadModel):
        os._exit(0)  # the parent died before it sent its command
    configure(config.log_level, config.log_format, config.worker_id)
    library.log.listener = _forward_log
    takes_commands: Future[Intake] = Future()
    renderer()  # a program of its own, which the walls would not let start
    if config.projector is not None:
        decoder()
    walls = walls_for(config)
    receiver = threading.Thread(target=_receive, args=(channel, takes_commands), name="intake")
    receiver.daemon = True
    receiver.start()
    info, intake, loop, outbox = start(config, walls, channel, black_box)
    library.on_abort(partial(report_abort, channel, EngineCrashed, "llama.cpp gave up"))
    gc.collect()
    gc.freeze()  # excludes permanent objects from garbage collection between steps
    channel.send([Ready(info), loop.stats()])
    takes_commands.set_result(intake)
    _run(loop, outbox, channel)


def _receive(channel: SyncChannel, intake: Future[Intake]) -> None:
    """The intake thread: receive commands until `Stop` or the end of the pipe, even while the
    engine loads."""
    try:
        while (command := channel.recv()) is not None and not isinstance(command, Stop):
            intake.result().handle(command)
    except ConnectionError:
        pass  # the parent left during a send
    except BaseException:
        log.exception("engine.intake_failed")
        os._exit(70)
    # The system frees what is left.
    os._exit(0)


def _run(loop: Loop, outbox: Outbox, channel: SyncChannel) -> None:
    """The engine thread. If the loop fails, the process exits: the black box shows the parent which
    request was in hand, and the other requests continue in the next engine."""
    try:
        loop.run()
    except BaseException as error:
        log.exception("engine.loop_failed")
        outbox.flush()
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        place = f"{Path(frame.f_code.co_filename).name}, line {line}"
        # Without the error's own message, which may quote a request's text.
        channel.send([EngineFailed(EngineCrashed(f"{type(error).__name__} in {place}."))])
        os._exit(70)


def _forward_log(level: LogLevel, line: str) -> None:
    """Log llama.cpp's warnings and errors as such, everything else for debugging."""
    is_expected = any(words in line for words in _EXPECTED_WARNINGS)
    is_shown = level in ("warning", "error") and not is_expected
    getattr(log, level if is_shown else "debug")("engine.native", line=line)


if __name__ == "__main__":
    main()
