"""Output on a real terminal, from the real command."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from tests.support.worker import PATIENCE_S, environment, installed
from worker.api.http.page import NO_CHAT
from worker.observability.terminal import LiveLine
from worker.wire.messages import Progress


@pytest.mark.parametrize(
    ("progress", "seconds", "percent_then", "expected"),
    [
        (Progress("resolve", 0.0), 1.0, 0.0, "looking for the model"),
        (
            Progress("load", 25.0, 5e7),
            2.0,
            0.0,
            "loading  ██████░░░░░░░░░░░░░░░░░░  25 %  50.0 MB/s  6 s left",
        ),
        (
            Progress("download", 1.0, 1e6),
            60.0,
            0.0,
            "downloading  ░░░░░░░░░░░░░░░░░░░░░░░░  1 %  1.0 MB/s  1.6 h left",
        ),
        (
            Progress("download", 75.0, 1e6),
            10.0,
            70.0,
            "downloading  ██████████████████░░░░░░  75 %  1.0 MB/s  50 s left",
        ),
        (
            Progress("download", 75.0, 1e6, 4_000_000_000),
            10.0,
            70.0,
            "downloading  ██████████████████░░░░░░  75 %  3.0 of 4.0 GB  1.0 MB/s  50 s left",
        ),
        (
            Progress("download", 29.0, 12.2e6, 73_400_000),
            2.0,
            0.0,
            "downloading  ██████░░░░░░░░░░░░░░░░  29 %  21.3 of 73.4 MB  12.2 MB/s  5 s left",
        ),
        (
            Progress("convert", 50.0, None, 5_200_000),
            1.0,
            0.0,
            "converting  ████████████░░░░░░░░░░░░  50 %  2.6 of 5.2 MB",
        ),
        (Progress("warmup", 0.0), 1.0, 0.0, "warming up"),
    ],
)
def test_a_phase_is_shown_with_share_rate_and_time_left(
    progress: Progress,
    seconds: float,
    percent_then: float,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    monkeypatch.setattr("worker.observability.terminal.moves_cursor", lambda: True)
    line = LiveLine(output := io.StringIO())
    line.show(Progress(progress.phase, percent_then))
    line.show(progress)
    assert output.getvalue().split("\x1b[K")[-1] == expected


def test_a_terminal_without_the_bar_shows_one_line_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.observability.terminal.moves_cursor", lambda: True)
    told = io.TextIOWrapper(io.BytesIO(), "latin-1", "backslashreplace", newline="")
    LiveLine(told).show(Progress("load", 100.0, 5e7, 9_000_000))
    told.seek(0)
    assert told.read() == f"\r\x1b[Kloading  {24 * '?'}  100 %  9.0 of 9.0 MB  50.0 MB/s"


def test_a_start_on_a_terminal_is_one_live_line_and_then_three(warm_cache: Path) -> None:
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        [*installed(), "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=its_end,
        env=environment(warm_cache, {"TERM": "xterm"}),
        cwd=warm_cache,
    )
    os.close(its_end)
    seen = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(terminal, 4096):
                seen.extend(chunk)
        except OSError:  # the last process with the terminal has exited
            return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while b"Page at" not in seen:
            assert time.monotonic() < deadline and process.poll() is None, seen
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        reader.join(PATIENCE_S)
        os.close(terminal)
    text = seen.decode().replace("\r\n", "\n")
    live, *lines = [line for line in text.split("\n") if line]
    assert live.count("\r\x1b[K") >= 3, "the line is written again and again"
    assert all("\x1b[K" not in line for line in lines)
    shown = live.split("\x1b[K")[-1]
    assert re.fullmatch(r"Listening on http://127\.0\.0\.1:\d+", shown)
    assert re.fullmatch(
        r"Serving tiny-model \(llama, .* parameters, Q8_0\) on CPU, \d+ threads: "
        r"8 slots, context of [\d,]+ tokens",
        lines[0],
    )
    assert re.fullmatch(r"Page at http://127\.0\.0\.1:\d+/", lines[1])
    assert re.fullmatch(rf"Chat at http://127\.0\.0\.1:\d+/chat/|{NO_CHAT}", lines[2])
    assert "{" not in text, "no JSON line comes between"


SHOWS = """\
import sys
from worker.observability.logs import configure, get_logger
from worker.observability.terminal import LiveLine
from worker.wire.messages import Progress
configure()
LiveLine(sys.stderr).show(Progress("load", 50.0))
get_logger().warning("engine.stalled")
"""


@pytest.mark.parametrize(
    ("variables", "is_live", "is_colored"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, False, False)],
)
def test_a_dumb_terminal_and_no_color_are_obeyed(
    variables: dict[str, str], is_live: bool, is_colored: bool, tmp_path: Path
) -> None:
    terminal, its_end = pty.openpty()
    termios.tcsetwinsize(its_end, (24, 30))
    env = environment(tmp_path, {"TERM": "xterm", "NO_COLOR": "", **variables})
    subprocess.run([sys.executable, "-c", SHOWS], stderr=its_end, env=env, check=True)
    seen = os.read(terminal, 4096).decode()  # less than the terminal buffers
    os.close(its_end)
    os.close(terminal)
    live = ["loading  ███████░░░░░░░  50 %"] * is_live
    assert re.findall(r"loading[^\r]*", seen) == live, "a line is no wider than the terminal"
    assert "engine.stalled" in seen
    assert "loading" not in seen.split("\x1b[K")[-1], "a log line takes the live line's place"
    assert ("\x1b[K" in seen) == is_live and ("\x1b[3" in seen) == is_colored
    assert is_live or "\x1b" not in seen
