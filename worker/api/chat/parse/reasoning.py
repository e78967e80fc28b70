"""Separates a model's reasoning from its answer, by the marks that its chat template uses.

Marks that are control tokens are visible because the request asks the engine to show them. One
splitter per choice, any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from worker.api.chat.delta import Delta, Parser, Reasoning, Text
from worker.api.chat.parse.calls import certain_part


@dataclass(frozen=True, slots=True)
class Marks:
    """Reasoning stands between `begin` and `end`, at the start of an answer."""

    begin: str
    end: str
    template: str
    """Matches the templates of models that use these marks."""
    anywhere: bool = False
    """Whether reasoning may also begin in the middle of an answer."""
    fillers: tuple[str, ...] = ()
    """Texts outside the reasoning that have no meaning."""


THINK = Marks("<think>", "</think>", r"</think>")
ALL_MARKS = (
    Marks("<seed:think>", "</seed:think>", r"<seed:think>"),
    Marks("<mm:think>", "</mm:think>", r"<mm:think>"),
    Marks("<think:opensource>", "</think:opensource>", r"HYTK = ':opensource'"),
    Marks("[THINK]", "[/THINK]", r"\[THINK\]", anywhere=True),
    Marks("<|START_THINKING|>", "<|END_THINKING|>", r"<\|START_THINKING\|>", anywhere=True),
    Marks(
        "<|channel>thought",
        "<channel|>",
        r"<\|channel>",
        anywhere=True,
        fillers=("<|channel>", "<channel|>"),
    ),
    Marks("<|open|>think<|sep|>", "<|close|>think<|sep|>", r"<\|close\|>|close_tag"),
    Marks("<|think|>", "<|end|>", r"<\|begin\|>[\s\S]*<\|think\|>", fillers=("<|content|>",)),
    Marks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", r"\[BEGIN FINAL RESPONSE\]"),
    Marks("<thinking>", "</thinking>", r"</thinking>"),
)


def marks_of(template: str | None) -> Marks:
    """The marks in a chat template; `THINK` if it shows none."""
    found = (marks for marks in ALL_MARKS if re.search(marks.template, template or ""))
    return next(found, THINK)


class ReasoningSplitter(Parser):
    """Reasoning that was cut off stays reasoning."""

    def __init__(self, marks: Marks, prompt_end: str = "") -> None:
        self._marks = marks
        self._inside = prompt_end.rstrip().endswith(marks.begin)
        """Whether the text is reasoning, which the template may already have opened."""
        self._held = ""
        self._blank = ""
        """White space at the end of the reasoning so far; it is dropped when the reasoning ends."""
        self._at_start = True
        """Whether the answer or the reasoning begins here; white space there is dropped."""
        self._said_anything = self._has_thought = False

    def run(self, text: str, *, final: bool) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        while self._held:
            step = self._think if self._inside else self._answer
            if not step(deltas, final):
                break
        return deltas

    def _think(self, deltas: list[Delta], final: bool) -> bool:
        before, found, behind = self._held.partition(self._marks.end)
        if found:
            self._inside, self._has_thought, self._held = False, True, behind
            self._send_reasoning(before, deltas)
            self._blank, self._at_start = "", True
            return True
        before, self._held = certain_part(self._held, (self._marks.end,), final)
        self._send_reasoning(before, deltas)
        return False

    def _send_reasoning(self, text: str, deltas: list[Delta]) -> None:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            deltas.append(Reasoning(kept))

    def _answer(self, deltas: list[Delta], final: bool) -> bool:
        marks = self._marks
        begun = self._held.lstrip()
        if not self._said_anything and not final and marks.begin.startswith(begun):
            if len(begun) < len(marks.begin):
                return False  # it may become the mark
        if not self._said_anything and begun and marks.end.startswith(begun[: len(marks.end)]):
            # An end mark without a begin mark has no meaning.
            if len(begun) < len(marks.end) and not final:
                return False
            if begun.startswith(marks.end):
                self._held, self._has_thought = begun[len(marks.end) :], True
                return True
        place = self._held.find(marks.begin) if marks.anywhere else -1
        if not self._said_anything and begun.startswith(marks.begin):
            place = len(self._held) - len(begun)
        if place >= 0:
            before = self._held[:place]
            self._send_text(before if self._said_anything else before.lstrip(), deltas)
            self._held = self._held[place + len(marks.begin) :]
            self._inside = self._at_start = True
            return True
        looked_for = (marks.begin, *marks.fillers) if marks.anywhere else marks.fillers
        text, self._held = certain_part(self._held, looked_for, final)
        self._send_text(text, deltas)
        return False

    def _send_text(self, text: str, deltas: list[Delta]) -> None:
        for filler in self._marks.fillers:
            text = text.replace(filler, "")
        if self._at_start and self._has_thought:
            text = text.lstrip()
        if text:
            self._at_start = False
            self._said_anything = self._said_anything or not text.isspace()
            deltas.append(Text(text))
