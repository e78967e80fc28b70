"""The bar that a person sees while a model is converted."""

from __future__ import annotations

import io
import re

from worker.convert.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_says_how_much_of_how_much_is_done_how_fast_and_how_long_it_takes() -> None:
    terminal = Terminal()
    bar = Bar(terminal, draw=True)
    bar.step("check", 0, 1)
    bar.step("convert", 0, 8_000_000_000)
    bar.step("convert", 8_000_000_000, 8_000_000_000)
    drawn = terminal.getvalue().split("\r")
    assert re.search(r"\.\] +0% check *$", drawn[1])
    assert "0 B / 8.0 GB" in drawn[2]
    assert re.search(r"100% convert +8\.0 GB / 8\.0 GB +\d+ MB/s +0:00 left$", drawn[3])


def test_a_file_gets_no_bar() -> None:
    stream = io.StringIO()
    Bar(stream, draw=True).step("convert", 1, 2)
    assert stream.getvalue() == ""
