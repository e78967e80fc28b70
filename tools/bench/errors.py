"""What a benchmark fails for, and how its commands end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from builds.errors import BuildError


class BenchError(Exception):
    """What is wrong and what would be right, in one sentence; printed without a traceback."""


def exit_code(run: Callable[[], None]) -> int:
    """Runs a command; what it fails for is a sentence on stderr.

    SIGTERM ends it as Ctrl-C does, with the servers that it started.
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
