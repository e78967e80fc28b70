"""Follows one answer's reasoning token by token, and closes it once its budget is spent.

The state follows from the tokens alone: an engine that continues an answer takes them again to
restore it. Built on an intake thread; from then on, only the engine thread uses it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from worker.llama.model import Model
from worker.wire.sampling import ReasoningRules

PROMPT_END_TOKENS = 16
"""Enough for the mark with which a chat template opens reasoning."""
_MOST_OF_A_CHARACTER = 3
"""Tokens that an incomplete character may still need; a model might never complete it."""


class ReasoningTrack:
    """Whether an answer is in a block of reasoning, and how much it has reasoned."""

    def __init__(
        self, rules: ReasoningRules, model: Model, prompt_end: Sequence[int], *, reopens: bool
    ) -> None:
        """`prompt_end`: the prompt's last tokens. With `reopens`, a mark in the answer begins
        reasoning, too; otherwise only one at the end of the prompt does."""
        self._model, self._reopens, self._anywhere = model, reopens, rules.anywhere
        self._begins = tuple(sorted((mark.encode() for mark in rules.begins), key=len))
        self._end = rules.end.encode()
        marks = b"|".join(map(re.escape, reversed(self._begins)))
        self._begin = re.compile(marks)
        self._no_text = re.compile(rb"(?:\s|%s)*" % re.escape(self._end))
        """What may precede reasoning at the start of an answer, even an end without a beginning."""
        self.budget = rules.budget
        """Tokens of reasoning after which a block is closed; `None`: any number."""
        self._closing = (
            *model.tokenize(rules.message, add_special=False, parse_special=False),
            *model.tokenize(rules.closing, add_special=False, parse_special=True),
        )
        self._n_closed = 0
        """How many tokens of the closing were just taken in a row."""
        self._n_spent = 0
        """Tokens of reasoning so far, in all blocks."""
        self._has_text = False
        self._tail = b""
        """The last bytes, which may begin the mark that is searched for."""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        end = b"".join(model.piece(t, special=True) for t in prompt_end)
        self.is_open = rules.goes_on or end.rstrip().endswith(self._begins)

    @property
    def given(self) -> int | None:
        """The token that comes next without a draw, because the budget is spent."""
        if not self.is_open or not self._is_spent or not self._closing:
            return None
        if not self._n_closed and self._characters.getstate()[0]:
            assert self.budget is not None
            if self._n_spent < self.budget + _MOST_OF_A_CHARACTER:
                return None  # the model completes the character first
        return self._closing[self._n_closed]

    def end(self) -> None:
        """Spend what is left of the budget."""
        if not self._is_spent:
            self.budget = self._n_spent

    @property
    def _is_spent(self) -> bool:
        return self.budget is not None and self._n_spent >= self.budget

    def admits(self, token: int) -> bool:
        """Whether an open block may go on with a token if a constrained answer follows it: the
        answer must not be skipped, and must begin with a token of its own."""
        seen = self._tail + self._model.piece(token, special=True)
        return token not in self._model.eog and not seen.partition(self._end)[2].strip()

    def take(self, token: int) -> None:
        """Advance by one token of the answer."""
        piece = self._model.piece(token, special=True)
        if self.is_open:
            self._characters.decode(piece)
            self._count(token)
        text = self._tail + piece
        while self.is_open or self._reopens:
            rest = self._after_end(text) if self.is_open else self._after_begin(text)
            if rest is None:
                return
            self.is_open, text, self._tail = not self.is_open, rest, b""
            self._characters.reset()
        self._n_closed = 0

    def _count(self, token: int) -> None:
        """Count a token of an open block: to its closing, or to the reasoning."""
        if self._is_spent and self._closing and token == self._closing[self._n_closed]:
            self._n_closed += 1
        else:
            self._n_closed = 0
            self._n_spent += 1

    def _after_end(self, text: bytes) -> bytes | None:
        """What follows the end of an open block; `None` while it goes on."""
        _, found, rest = text.partition(self._end)
        if found or self._n_closed == len(self._closing) > 0:
            self._n_closed = 0
            return rest
        self._tail = text[max(len(text) + 1 - len(self._end), 0) :]
        return None

    def _after_begin(self, text: bytes) -> bytes | None:
        """What follows the mark that opens a block; `None` if there is none."""
        if self._has_text and not self._anywhere:
            return None
        if not self._anywhere:
            text = self._no_text.sub(b"", text, count=1)
        if found := self._begin.search(text) if self._anywhere else self._begin.match(text):
            return text[found.end() :]
        if self._anywhere:
            self._tail = text[max(len(text) + 1 - len(self._begins[-1]), 0) :]
        else:
            self._tail = text
            marks = (*self._begins, self._end)
            self._has_text = not any(mark.startswith(text) for mark in marks)
        return None
