"""Splits an answer into text and calls while it grows. Never raises, whatever the text.

In text, the parser looks for a mark that begins a section of calls. In a section, it tries the
dialect's forms on what follows and skips fillers; anything else ends the section. Text that began
like a call but is none becomes text again, with its mark. One per choice, any thread.
"""

from __future__ import annotations

import re

from worker.api.chat.delta import Delta, Parser, Text
from worker.api.chat.parse.calls import Calls, ToolUse, begun_mark
from worker.api.chat.parse.dialects import GENERIC, Dialect
from worker.api.chat.parse.forms import Form, JsonCall, LiteralCall, NamedCall
from worker.api.chat.parse.json_calls import NamedReader, ObjectReader
from worker.api.chat.parse.literal_calls import LiteralReader
from worker.api.chat.parse.tagged_calls import TaggedReader

Reader = ObjectReader | NamedReader | LiteralReader | TaggedReader
"""Reads one call from a growing text; what it has not used when it is done is in `held`."""

_WORD = re.compile(r"[^\s<\[{\]}]*")
_BRACKETS = "[],"


class CallParser(Parser):
    def __init__(self, use: ToolUse, dialect: Dialect) -> None:
        # Every model writes a forced call as bare JSON.
        self._dialect = GENERIC if use.forced is not None else dialect
        self._marks, self._beginnings = self._dialect.marks, self._dialect.beginnings
        self._control_fillers = self._dialect.control_fillers
        self._calls = Calls(use, dialect.id_length)
        self._held = ""
        self._blank = ""
        """White space after the text so far; it is dropped before a call."""
        self._raw = ""
        """What a section has skipped since its beginning or its last call."""
        self._in_section = False
        self._section_calls = 0
        self._reader: Reader | None = None
        self._at_start, self._follows_call = True, False

    def run(self, text: str, *, final: bool) -> list[Delta]:
        self._held += text
        going = True
        while going:
            if self._reader is not None:
                going = self._read(self._reader, final)
            elif self._in_section:
                going = self._read_section(final)
            else:
                going = self._read_text(final)
        deltas, self._calls.deltas = self._calls.deltas, []
        if final:
            if self._blank and not self._calls.count:
                deltas.append(Text(self._blank))
            self._blank = ""
        return deltas

    # --- in text ---------------------------------------------------------------------------

    def _read_text(self, final: bool) -> bool:
        """Emit the text before the next mark; returns whether a section follows."""
        if self._at_start and self._dialect.bare:
            begun = self._held.lstrip()
            if not begun and not final:
                return False
            self._at_start = False
            if begun[:1] in ("{", "["):
                self._begin_section(len(self._held) - len(begun))
                return True
        opens = self._dialect.opens
        places = [place for mark in opens if (place := self._held.find(mark)) >= 0]
        if places:
            self._begin_section(min(places))
            return True
        n_kept = 0 if final else begun_mark(self._held, self._marks)
        self._send_text(len(self._held) - n_kept)
        return False

    def _begin_section(self, place: int) -> None:
        self._send_text(place)
        self._in_section, self._section_calls, self._raw = True, 0, ""

    def _send_text(self, until: int) -> None:
        text, self._held = self._held[:until], self._held[until:]
        for token in self._control_fillers:
            text = text.replace(token, "")
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._calls.deltas.append(Text(kept.lstrip() if self._follows_call else kept))
            self._follows_call = False

    # --- in a section ----------------------------------------------------------------------

    def _read_section(self, final: bool) -> bool:
        """Skip one filler, begin a call or leave the section; false if more text is needed."""
        if not self._held:
            if final:
                self._leave_section()
            return False
        form = self._form_here()
        if form is not None:
            self._reader = _reader(form, self._calls)
            return True
        if self._held[0].isspace():
            self._pass_over(1)
            return True
        for mark in sorted(self._marks, key=len, reverse=True):
            if self._held.startswith(mark):
                self._pass_over(len(mark))
                return True
        if not final and begun_mark(self._held, self._beginnings) == len(self._held):
            return False
        if self._takes_lists and self._held[0] in _BRACKETS:
            self._pass_over(1)
            return True
        self._leave_section()
        return bool(self._held)

    @property
    def _takes_lists(self) -> bool:
        return any(isinstance(form, JsonCall) for form in self._dialect.forms)

    def _form_here(self) -> Form | None:
        """The form of the call that may begin here."""
        if begun_mark(self._held, self._beginnings) == len(self._held):
            return None  # it may become a mark
        for form in self._dialect.forms:
            if isinstance(form, JsonCall):
                if self._held[0] == "{":
                    return form
            elif isinstance(form, LiteralCall):
                if not any(self._held.startswith(mark) for mark in self._marks):
                    return form
            elif self._held.startswith(form.begins) if form.begins else self._may_be_named():
                return form
        return None

    def _may_be_named(self) -> bool:
        word = _WORD.match(self._held)
        begun = word[0].removeprefix("functions.") if word is not None else ""
        if begun and "functions.".startswith(begun):
            return True
        return bool(begun) and self._calls.may_be_offered(begun)

    def _pass_over(self, n_chars: int) -> None:
        self._raw += self._held[:n_chars]
        self._held = self._held[n_chars:]

    def _leave_section(self) -> None:
        """Return to text. If the section had no call, what it skipped is text."""
        raw, self._raw, self._in_section = self._raw, "", False
        if not self._section_calls:
            self._held = raw + self._held
            # The mark that opened the section is text now, and is not read again.
            self._send_text(len(raw) or len(self._held[:1]))

    def _read(self, reader: Reader, final: bool) -> bool:
        text, self._held = self._held, ""
        n_before = self._calls.count
        progress = reader.advance(text, final=final)
        self._section_calls += self._calls.count - n_before
        if self._calls.count > n_before:
            self._blank = self._raw = ""
            self._follows_call = True
        if progress == "more":
            return False
        self._held, self._reader = reader.held, None
        if progress == "failed":
            self._held = self._raw + reader.held
            self._in_section, self._raw = False, ""
            if self._held:
                self._send_text(self._n_failed(self._held))
        return bool(self._held) or self._in_section

    def _n_failed(self, text: str) -> int:
        """The length of a failed call that is certainly text: up to the next mark in it."""
        places = [p for m in self._dialect.opens if (p := text.find(m, 1)) >= 1]
        return min(places, default=len(text) - begun_mark(text, self._marks))


def _reader(form: Form, calls: Calls) -> Reader:
    if isinstance(form, JsonCall):
        return ObjectReader(form, calls)
    if isinstance(form, NamedCall):
        return NamedReader(form, calls)
    if isinstance(form, LiteralCall):
        return LiteralReader(form, calls)
    return TaggedReader(form, calls)
