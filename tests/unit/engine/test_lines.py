"""An answer ends at a line, however its text is cut into pieces."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.text.lines import LineGuard
from worker.wire.work import LineLimits

LINES = st.text("a \t\n", max_size=40)


@given(pieces=st.lists(LINES, max_size=8), n_indent=st.integers(1, 4))
def test_a_line_with_too_few_blanks_ends_the_answer(pieces: list[str], n_indent: int) -> None:
    """Like in llama-server, the blanks of that line stay."""
    text = "".join(pieces)
    guard = LineGuard(LineLimits(n_indent))
    too_few = re.search(rf"\n[ \t]{{0,{n_indent - 1}}}(?=[^ \t])", text)
    assert "".join(map(guard.feed, pieces)) == (text[: too_few.end()] if too_few else text)
    assert guard.is_over is (too_few is not None)


@given(pieces=st.lists(LINES.filter(bool), max_size=8), after=st.integers(0, 8))
def test_after_a_time_the_next_end_of_a_line_ends_the_answer(pieces: list[str], after: int) -> None:
    """The clock advances a second with each piece."""
    now = 0
    guard = LineGuard(LineLimits(after_ms=1000 * after), lambda: now)
    sent = ""
    for now, piece in enumerate(pieces):  # noqa: B007 - the clock reads it
        sent += guard.feed(piece)
    late = [n for n, piece in enumerate(pieces) if 0 < after < n and "\n" in piece]
    assert sent == "".join(pieces[: late[0] + 1] if late else pieces)
    assert guard.is_over is bool(late)
    if 0 < after < len(pieces) and not late:  # another engine goes on
        limits = LineLimits(after_ms=1000 * after, began=100 - now)
        guard = LineGuard(limits, lambda: 100)
        assert guard.feed(sent, is_new=False) == sent and not guard.is_over
        assert (guard.feed("b\n"), guard.is_over) == ("b\n", now > after)
