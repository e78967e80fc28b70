"""The errors of benchmarks, and the exit codes of their commands."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from builds.errors import BuildError


class BenchError(Exception):
    """Says in one sentence what is wrong and what would be right; printed without a traceback."""


def exit_code(run: Callable[[], None]) -> int:
    """Run a command, and report a `BenchError` as a sentence on stderr.

    SIGTERM ends it like Ctrl-C, together with the servers that it started.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except (BenchError, BuildError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
