"""Splits one choice's text into reasoning, text and calls. One parser per choice, any thread.

The model's text is passed on unchanged, without its marks: those of reasoning, those of calls, and
the frames that some templates and models put around an answer's text. What looks like a call, but
calls no offered function, stays text, with its marks. If a call is forced, there is no text: what
is not a call is the beginning of one that was cut off. Never raises, whatever the text.
"""

from __future__ import annotations

import re
from functools import lru_cache

from worker.api.chat.delta import Delta, Reasoning
from worker.api.chat.parse.calls import NO_TOOLS, Deltas, ToolUse
from worker.api.chat.parse.conventions import (
    BESIDE_JSON,
    GENERIC,
    Convention,
    Conventions,
    Form,
)
from worker.api.chat.parse.json_calls import (
    read_arguments,
    read_exact,
    read_keyed,
    read_named,
)
from worker.api.chat.parse.json_values import to_json
from worker.api.chat.parse.literal_calls import Notation
from worker.api.chat.parse.source import BLANK, Header, Source, Steps, ignore, marks_of
from worker.api.chat.parse.tagged_calls import TaggedCall, Tags
from worker.api.chat.request import INPUT


class _AnswerMarks:
    """The marks to look for in an answer, which depend on the model and on the request."""

    def __init__(
        self, own: Conventions, calls: Convention, *, has_tools: bool, splits_reasoning: bool
    ) -> None:
        begins, ends = (own.thinking.begin, own.thinking.also), (own.thinking.end,)
        is_framed = own.calls.always_framed and not splits_reasoning
        self.frames = (*calls.frames, *begins, *ends) if is_framed else calls.frames
        self.reasoning_begins = begins if splits_reasoning else ()
        self.reasoning_ends = ends if splits_reasoning else ()
        wrap = own.wrap if splits_reasoning else ""
        self.wrap_begins = (f"<{wrap}>\n", f"<{wrap}>") if wrap else ()
        self.wrap_ends = (f"\n</{wrap}>", f"</{wrap}>") if wrap else ()
        self.call_begins = calls.opens + calls.begins if has_tools else ()
        gaps = (calls.gap[n:] for n in range(len(calls.gap) + 1))
        self.gaps = {gap + begin: gap for gap in gaps for begin in self.call_begins}
        """Maps each mark of a call, with line ends before it, to those line ends."""
        wraps = (*self.wrap_begins, *self.wrap_ends)
        self.around = (*self.reasoning_begins, *self.reasoning_ends, *self.frames, *wraps)
        """Marks that are not part of a section of calls."""
        self.all = marks_of(*self.gaps, *self.around)
        self.of_calls = marks_of(*self.gaps)
        between = (*calls.opens, *calls.closes, *calls.between)
        self.in_section = marks_of(*between, *self.around)
        # A mark of calls may begin a frame, too, so it counts even without tools.
        self.may_be_open = marks_of(*self.around, *calls.opens, *self.call_begins).texts
        """The marks that a prompt may end with, the longest first."""


_answer_marks = lru_cache(maxsize=32)(_AnswerMarks)
_OBJECT = Header("{")
_INPUT = Header(f'{{~"{INPUT}"')
"""Begins a custom tool's arguments; anything else is its bare text, which may itself be JSON."""


class AnswerParser:
    """Parses the text of one choice as it arrives."""

    def __init__(
        self,
        conventions: Conventions,
        use: ToolUse | None,
        prompt_end: str = "",
        *,
        splits_reasoning: bool = True,
        goes_on: bool = False,
        has_form: bool = False,
        resembles_calls: bool = False,
    ) -> None:
        """`prompt_end` is the end of the rendered prompt. Without `use`, calls stay text.
        `goes_on`: the prompt ends within reasoning, which the answer continues. `has_form`: the
        answer's text has an enforced form, whose texts may contain the spelling of marks.
        `resembles_calls`: that form allows what only begins like a call in JSON."""
        self._calls = conventions.calls
        if use is not None and use.is_json:
            self._calls = GENERIC if use.forced else BESIDE_JSON
        self._thinking = conventions.thinking
        self._use, self._resembles_calls = use or NO_TOOLS, resembles_calls
        self._marks = _answer_marks(
            conventions, self._calls, has_tools=use is not None, splits_reasoning=splits_reasoning
        )
        # Text of a form extends to the answer's end, unless a call follows.
        self._in_text = self._marks.of_calls if has_form else self._marks.all
        # A mark that the prompt leaves open, with white space after it, begins the text to read.
        plain = prompt_end.rstrip()
        mark = next((mark for mark in self._marks.may_be_open if plain.endswith(mark)), "")
        opening = prompt_end[len(plain) - len(mark) :] if mark else ""
        if goes_on and splits_reasoning:
            opening = self._thinking.begin + self._thinking.pads[0]
        self._source = Source(opening)
        self._deltas = Deltas(self._use, conventions.calls.id_length, len(opening))
        self._steps = self._answer()
        self.is_reasoning = False
        """Whether the next text belongs to reasoning or to its end mark."""

    @property
    def is_in_call(self) -> bool:
        """Whether arguments of a call are still to come."""
        return self._deltas.is_in_call

    def feed(self, text: str) -> list[Delta]:
        """Take more output; returns the deltas that are certain by now.

        Most of an answer needs no parsing: no character of it begins a mark or ends a string, and
        no text before it is undecided. It becomes a delta at once. Anything else is parsed.
        """
        source = self._source
        if source.flow is not None and source.at == len(source.text):
            plain, grow = source.flow
            if plain.fullmatch(text):
                return [grow(text)]
        return self._read(text)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """The deltas that were withheld. `is_cut`: a limit or a stop ended the text, perhaps within
        a mark."""
        self._source.is_cut = is_cut
        return self._read("", final=True)

    def _read(self, text: str, *, final: bool = False) -> list[Delta]:
        self._source.add(text, final=final)
        next(self._steps, None)
        return self._deltas.take()

    def _answer(self) -> Steps[None]:
        source, deltas, marks = self._source, self._deltas, self._marks
        blank, at_edge, has_text, has_thought, is_wrapped = "", True, False, False, False
        # `blank` is white space next to a mark; `at_edge`: a mark was just read, or nothing yet.
        while True:
            mark, is_bare = "", False
            if at_edge:
                blank += yield from source.run_of(BLANK)
                mark = yield from source.here(self._in_text if has_text else marks.all)
                if self._calls.bare and self._use is not NO_TOOLS and not (mark or has_text):
                    is_bare = (yield from source.peek()) in ("{", "[")
            if not mark and not is_bare and (yield from source.peek()):
                deltas.text(blank)
                blank, has_text = "", True
                mark = yield from source.until(
                    self._in_text, deltas.text, deltas.grow_text, keeps_begun=True
                )
            if is_bare or mark in marks.gaps:
                raw = blank + source.take(marks.gaps.get(mark, ""))
                blank, at_edge = yield from self._section(raw, is_bare=is_bare)
                has_text = has_text or not at_edge
                continue
            if not mark:
                deltas.text("" if deltas.n_calls else blank)
                return
            if has_text:
                deltas.text(blank)
            blank, at_edge = "", True
            if mark in marks.reasoning_begins and (self._thinking.anywhere or not has_text):
                yield from self._think(mark)
                has_thought = True
            elif mark in marks.reasoning_ends and not has_text:
                yield from self._drop(mark, self._thinking.pads[2])
                has_thought = True
            elif mark in marks.frames:
                yield from self._drop(mark)
            elif mark in marks.wrap_begins and has_thought and not has_text:
                yield from self._drop(mark)
                is_wrapped = True
            elif mark in marks.wrap_ends and is_wrapped and (yield from self._is_last(mark)):
                return
            else:
                deltas.text(source.take(mark))
                at_edge, has_text = False, True

    def _drop(self, mark: str, pad: str = "") -> Steps[None]:
        """Drop a mark, the prompt's white space after it, and the rest of its pad."""
        source, deltas = self._source, self._deltas
        source.take(mark)
        n_blanks = max(deltas.n_prompt_chars - len(mark), 0)
        source.take_to(source.at + n_blanks)
        deltas.n_prompt_chars = 0
        yield from source.drop(pad[n_blanks:])

    def _is_last(self, mark: str) -> Steps[bool]:
        """Whether only white space follows the mark here."""
        source = self._source
        while not source.text[source.at + len(mark) :].strip():
            if not (yield from source.more()):
                return True
        return False

    def _think(self, mark: str) -> Steps[None]:
        after_begin, before_end, after_end = self._thinking.pads
        self.is_reasoning = True
        yield from self._drop(mark, after_begin)
        ends = marks_of(before_end + self._thinking.end, self._thinking.end)
        if end := (yield from self._source.until(ends, self._deltas.reasoning, Reasoning)):
            self.is_reasoning = False
            yield from self._drop(end, after_end)

    def _section(self, raw: str, *, is_bare: bool = False) -> Steps[tuple[str, bool]]:
        """Read the calls that begin here; `raw` is the text before them that was taken already.

        Returns the white space after the last call and true, or nothing and false if text follows:
        anything that is neither a call nor a separator of calls.
        """
        source, deltas = self._source, self._deltas
        n_before, is_open = deltas.n_calls, True
        while True:
            raw += yield from source.run_of(BLANK)
            mark = yield from source.here(self._marks.in_section)
            if mark in self._calls.closes and deltas.n_calls > n_before:
                source.take(mark)
                raw, is_open = "", False
            elif mark and mark not in self._marks.around:
                raw += source.take(mark)
                is_open = True
            elif mark:
                break
            else:
                source.remember()
                is_call = yield from self._call(is_bare)
                taken = source.forget()
                if not is_call:
                    follows = deltas.n_calls > n_before
                    raw = self._after_call(raw, taken, is_open) if follows else raw + taken
                    break
                raw = ""
        is_blank = not raw.strip()
        if is_blank and deltas.n_calls > n_before:
            return raw, True
        if is_blank:  # the mark here is text
            raw += source.take((yield from source.peek()))
        deltas.text(raw)
        return "", False

    def _after_call(self, marks: str, taken: str, is_open: bool) -> str:
        """The text after a call, of which a part was taken, without the beginning of a mark or of
        another call that a limit or a stop cut off. `marks` are those before it; `is_open`: none of
        them ends the section."""
        source, begins = self._source, self._calls.begins
        if not source.is_cut:
            return marks + taken
        is_marked = marks.strip() != ""
        headers = [form.header for form in self._calls.forms]
        source.drop_begun(
            self._marks.in_section,
            headers if is_marked else [each for each in headers if each.parts[0] in begins],
        )
        is_call = is_marked or taken.startswith(begins) or (is_open and taken != "")
        return "" if is_call and source.at == len(source.text) else marks + taken

    def _call(self, is_bare: bool) -> Steps[bool]:
        """Read one call; false if what was taken is not a call of an offered function."""
        source, deltas, use = self._source, self._deltas, self._use
        found = yield from source.fit_one(form.header for form in self._calls.forms)
        if found is None:
            return False
        form, fields = self._calls.forms[found[0]], found[1]
        match form.arguments:
            case "object":
                return (yield from read_named(source, deltas, is_bare=is_bare))
            case "exact":
                return (yield from read_exact(source, deltas, may_go_on=self._resembles_calls))
            case "keyed":
                return (yield from read_keyed(source, deltas))
        name = use.offered(fields.get("name") or fields["id"])
        if name is None:
            return False
        match form.arguments:
            case Tags() as tags:
                follow = marks_of(tags.end, *self._marks.call_begins, *self._calls.closes)
                call = TaggedCall(source, deltas, tags, follow, name)
                return (yield from call.read())
            case Notation() as notation:
                return (yield from self._whole(notation, form))
        is_text = use.tools[name].is_custom
        if is_text or form.arguments == "code":
            blanks = yield from source.run_of(BLANK)
            if (yield from source.look(_INPUT if is_text else _OBJECT)) is None:
                return (yield from self._unescaped(name, blanks, fields.get("id")))
        return (yield from read_arguments(source, deltas, name, fields.get("id")))

    def _whole(self, notation: Notation, form: Form) -> Steps[bool]:
        """Read calls in a notation that is parsed as a whole; false unless all are offered."""
        source, deltas = self._source, self._deltas
        begin = form.header.parts[-1]
        end = form.end or {"(": ")", "{": "}"}[begin]
        quotes = notation.quotes
        marks = marks_of(end, *quotes, *(() if form.end else (begin, "\\")))
        depth, quote = 1, ""
        while depth:
            mark = yield from source.until(marks, ignore)
            if not mark:
                return False
            source.take(mark)
            if mark == "\\" and len(quote) == 1:  # it escapes the next character
                source.take((yield from source.peek()))
            elif mark in quotes and quote in ("", mark):
                quote = "" if quote else mark
            elif not quote and mark in (begin, end):
                depth += 1 if mark == begin else -1
        found = notation.calls(source.taken.removesuffix(form.end))
        calls = [(self._use.offered(name), arguments) for name, arguments in found]
        if any(name is None for name, _ in calls):
            return False
        for name, arguments in calls:
            deltas.whole_call(name or "", arguments)
        return bool(calls)

    def _unescaped(self, name: str, blanks: str, call_id: str | None) -> Steps[bool]:
        """Read a text in place of JSON: the value of the function's first parameter. Only a mark
        after it shows that it is complete."""
        parts, calls = [blanks], self._calls
        recipients = ("all", *self._use.tools)
        begins = (f"{mark}{name}\n" for mark in calls.opens for name in recipients)
        named = (mark for mark in (*calls.opens, *calls.closes) if re.search(r"\w", mark))
        end = yield from self._source.until(marks_of(*begins, *named), parts.append)
        keys = list(self._use.properties(name))
        if not keys or not parts[1:]:
            return False
        self._deltas.call(name, call_id)
        self._deltas.arguments(to_json({keys[0]: "".join(parts)}))
        if end:
            self._deltas.end_call()
        return True
