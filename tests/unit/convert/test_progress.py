"""The bar that a person sees while a model is converted."""

from __future__ import annotations

import io
import re

from worker.commands.progress import Reporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_says_how_much_of_how_much_is_done_how_fast_and_how_long_it_takes() -> None:
    terminal = Terminal()
    bar = Reporter("bar", terminal)
    bar.step("check", 0, 1)
    bar.step("convert", 0, 8_000_000_000)
    bar.step("convert", 8_000_000_000, 8_000_000_000)
    bar.note("done")
    drawn = [text for text in terminal.getvalue().split("\r") if text.strip()]
    assert re.match(r"  0% check ", drawn[0])
    assert "0.00B / 8.00GB" in drawn[1] or "0.00B / 8.00GB" in drawn[2]
    assert re.search(
        r"100% convert +#+ 8\.00GB / 8\.00GB +\S+B/s 00:00 left\nnote: done$", drawn[-1]
    )


def test_a_file_gets_no_bar() -> None:
    stream = io.StringIO()
    Reporter("bar", stream).step("convert", 1, 2)
    assert stream.getvalue() == ""
