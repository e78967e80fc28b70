"""Parses one choice's text into reasoning, text and calls. One parser per choice, any thread."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from worker.api.chat.delta import Delta, Parser, Text
from worker.api.chat.parse.calls import PartsParser, ToolUse
from worker.api.chat.parse.channels import ChannelParser
from worker.api.chat.parse.dialects import FUNCTIONARY_3_2, GPT_OSS, Dialect, dialect_of
from worker.api.chat.parse.parser import CallParser
from worker.api.chat.parse.reasoning import Marks, ReasoningSplitter, marks_of
from worker.api.chat.parse.recipients import RecipientParser

_TOKENS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class Conventions:
    """How a model writes its answers, as its chat template shows."""

    dialect: Dialect
    marks: Marks

    def tokens(self, *, calls: bool, reasoning: bool) -> tuple[str, ...]:
        """Control tokens that the engine must show as text, to tell calls or reasoning by."""
        texts: list[str] = []
        if reasoning:
            texts += [self.marks.begin, self.marks.end, *self.marks.fillers]
        if calls or self.dialect is GPT_OSS:
            texts += self.dialect.beginnings
        parts = (part for text in texts for part in (text, *_TOKENS.findall(text)))
        return tuple(dict.fromkeys(parts))

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """The marks of the reasoning that may precede a constrained answer."""
        if self.dialect is GPT_OSS:
            return None
        return self.marks.begin, self.marks.end


@lru_cache(maxsize=8)
def conventions_of(template: str | None) -> Conventions:
    return Conventions(dialect_of(template), marks_of(template))


class AnswerParser(Parser):
    """`prompt_end` is the end of the rendered prompt. Without `use`, calls stay text."""

    def __init__(
        self,
        conventions: Conventions,
        use: ToolUse | None,
        prompt_end: str = "",
        *,
        splits_reasoning: bool = True,
    ) -> None:
        self._alone: PartsParser | None = None
        """The parser of a dialect that marks every part of an answer; it replaces the others."""
        self._splitter: ReasoningSplitter | None = None
        self._calls: CallParser | None = None
        if use is None or use.forced is None:
            offered = use or ToolUse.of(())
            if conventions.dialect is GPT_OSS:
                self._alone = ChannelParser(offered, splits_reasoning=splits_reasoning)
                return
            if conventions.dialect is FUNCTIONARY_3_2:
                self._alone = RecipientParser(offered, prompt_end)
                return
        if splits_reasoning:
            self._splitter = ReasoningSplitter(conventions.marks, prompt_end)
        if use is not None:
            self._calls = CallParser(use, conventions.dialect)

    def run(self, text: str, *, final: bool) -> list[Delta]:
        if self._alone is not None:
            return self._alone.run(text, final=final)
        pieces: list[Delta]
        if self._splitter is not None:
            pieces = self._splitter.run(text, final=final)
        else:
            pieces = [Text(text)] if text else []
        if self._calls is None:
            return pieces
        found: list[Delta] = []
        for piece in pieces:
            found += self._calls.feed(piece.text) if isinstance(piece, Text) else [piece]
        return found + (self._calls.finish() if final else [])
