"""What clients may write into the log: nothing that its reader's terminal takes for a command."""

from __future__ import annotations

import subprocess
import sys

WRITES = """\
from worker.observability.logs import configure, get_logger
configure("info", "console")
asked = {"path": "/\\x1b]0;evil\\x07\\x9b2J", "job_id": "é\\x1b[31m", "status": 404}
get_logger().info("request.answered", **asked)
"""


def test_a_terminal_is_shown_control_characters_as_text() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, check=True)
    line = done.stderr.decode()
    assert "é\\x1b[31m" in line and "/\\x1b]0;evil\\x07\\x9b2J" in line and "status=404" in line
    assert line.removesuffix("\n").isprintable()
