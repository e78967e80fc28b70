"""`python -m builds`: refuses a Python that is too old before it imports anything that needs a
newer one.
"""

import signal
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this very check is what an old Python must reach
    found = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(
        f"Python 3.11 or newer is needed, and {sys.executable} is {found}. "
        "Point to a newer one: make PYTHON=python3.11 ..."
    )

from builds.cli import main  # noqa: E402 - after the version check

# A terminal that is closed sends SIGHUP, but not to the compilers: their group is their own.
_ENDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def _interrupt(number: int, frame: object) -> None:
    """The first signal ends a build, and no other one disturbs the end."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


for each in _ENDS:
    if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(each, _interrupt)
sys.exit(main())
