"""Keeps control tokens that are spelled out in a chat's texts from becoming control tokens.

Otherwise anyone who writes `<|im_end|>` into a message would end it and continue in another role. A
mark is inserted into each such spelling before the template sees it. The marks show where the
spellings are in the rendered text, however the template trimmed, split or quoted its input. A chat
without a spelling is not changed: its text is tokenised as a whole. Intake thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from worker.engine.text.deletions import Deletion, shortened
from worker.engine.text.forms import Chat
from worker.errors import InvalidRequest

_TURN = re.compile(r"<[|\uff5c].+[|\uff5c]>|<(start|end)_of_\w+>|\[/?[A-Z_]+\]", re.DOTALL)
"""Matches the texts of tokens that mark turns, such as `<|user|>`, `<start_of_turn>` and
`[INST]`."""


class Spellings:
    """The spellings of the control tokens that a rendered chat contains.

    Some vocabularies have turn marks among their user-defined tokens, which llama.cpp finds in any
    text. Other user-defined tokens, such as `<think>`, are left alone: templates may look for them
    in messages.
    """

    def __init__(self, control: Iterable[str], user_defined: Iterable[str] = ()) -> None:
        self._found_anywhere = {t for t in user_defined if _TURN.fullmatch(t)}
        # A single character cannot be split, and templates may compare a word (`user`).
        marks = {t for t in control if len(t) > 1 and not t.isidentifier()}
        # Longest first, in the order in which llama.cpp looks for them.
        self._all = sorted(marks | self._found_anywhere, key=len, reverse=True)
        beginnings = {t[:n] for t in self._all for n in range(1, len(t))}
        self._beginnings = tuple(each for each in beginnings if not each.isidentifier())

    def marking(
        self, chat: Chat, field: str, deletions: Callable[[], Sequence[Deletion]]
    ) -> tuple[Chat, str] | None:
        """The chat with a mark in each spelling, and the mark; `None` if there is no spelling.

        A text that ends with the beginning of a spelling counts, too: many templates join the parts
        of a content. So does a text that spells a token once the template has deleted something;
        `deletions` is called only if the texts have all characters of a token.

        Raises:
            InvalidRequest: no character is left for a mark, or values are nested too deeply; names
                `field`, the request's field of the messages.
        """
        texts: list[str] = []
        try:
            _mapped(list(chat.values()), texts.append)
        except RecursionError:
            why = "the arguments of a call are nested too deeply"
            raise InvalidRequest.of_field(field, why) from None
        joined = "\0".join(texts)
        may_be_cut = any(all(each in joined for each in spelling) for spelling in self._all)
        deleted = deletions() if may_be_cut else ()
        is_begun = any(text.endswith(self._beginnings) for text in texts)
        if not (deleted or is_begun or self._pattern(joined)):
            return None
        begins = {text: self._begins(text, deleted) for text in texts}
        if not any(begins.values()):
            return None
        mark = _unused_character(joined)
        if mark is None:
            why = "it spells a control token, and has every private-use character"
            raise InvalidRequest.of_field(field, why)

        def marked(text: str) -> str:
            cuts = [0, *(at + 1 for at in sorted(begins[text])), len(text)]
            return mark.join(text[begin:end] for begin, end in pairwise(cuts))

        return {name: _mapped(value, marked) for name, value in chat.items()}, mark

    def _begins(self, text: str, deletions: Sequence[Deletion]) -> set[int]:
        """Where spellings begin in a text, including those that begin within another."""
        found: set[int] = set()
        for left, places in ((text, range(len(text))), *shortened(text, deletions)):
            if pattern := self._pattern(left):
                found |= {places[each.start()] for each in re.finditer(f"(?={pattern})", left)}
            if left.endswith(self._beginnings):
                begun = (each for each in self._beginnings if left.endswith(each))
                found |= {places[len(left) - len(each)] for each in begun}
        return found

    def split(self, rendered: str, mark: str) -> Iterator[tuple[str, bool]]:
        """The parts of a rendered text without the marks, each with whether control tokens are
        recognised in it.

        The text is cut only at control tokens, where every tokenizer starts anew.
        """
        rest = ""
        # Templates may have escaped the mark as in JSON.
        marks = re.compile(rf"{mark}|\\u{ord(mark):04x}")
        for part in re.split(f"({self._pattern(rendered) or '(?!)'})", rendered):
            broken = marks.split(part)
            if len(broken) == 1:
                rest += part
                continue
            yield rest, True
            plain = "".join(broken)
            if any(spelling in plain for spelling in self._found_anywhere):
                yield from ((piece, False) for piece in broken)
            else:
                yield plain, False
            rest = ""
        yield rest, True

    def _pattern(self, text: str) -> str | None:
        found = [re.escape(spelling) for spelling in self._all if spelling in text]
        return "|".join(found) if found else None


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    """A JSON value with every string in it changed, keys included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(name): _mapped(item, change) for name, item in value.items()}
        case list() | tuple():
            return type(value)(_mapped(item, change) for item in value)
    return value


def _unused_character(text: str) -> str | None:
    """A private-use character that is not in `text`, not even as a JSON escape."""
    codes = (code for code in range(0xE000, 0xF900) if f"\\u{code:04x}" not in text)
    return next((chr(code) for code in codes if chr(code) not in text), None)
