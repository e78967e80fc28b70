"""`python -m builds`: refuses a Python that is too old before it imports anything that needs a
newer one.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - this very check is what an old Python must reach
    found = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(
        f"Python 3.11 or newer is needed, and {sys.executable} is {found}. "
        "Point to a newer one: make PYTHON=python3.11 ..."
    )

from builds.cli import main  # noqa: E402 - after the version check

sys.exit(main())
