"""Finds out what a chat template deletes from texts.

A deletion joins the text before it and the text after it, which may then be a control token:
SmolLM3's template deletes `/think` from `<|im_/thinkend|>`. The candidates are the words in the
expressions of a template's source. Probes with each word between two marks show what is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from worker.engine.text.forms import Chat, assistant, system, user
from worker.engine.text.probes import Render, calling, chat_of, result

_BEFORE, _AMONG, _AFTER = "before5eb1", "among5eb1", "after5eb1"
_TO_THE_END = None


class Deletion(NamedTuple):
    """Deletes text from one word to another, both included."""

    first: str
    last: str = ""
    """If empty, only the first word is deleted."""
    is_longest: bool = False
    """Whether it reaches to the last such word, or the end; else to the next one, repeatedly."""

    def kept(self, text: str) -> list[tuple[int, int]]:
        """The begin and end of each span of a text that is left."""
        spans: list[tuple[int, int]] = []
        begin = 0
        while (at := text.find(self.first, begin)) >= 0:
            find = text.rfind if self.is_longest else text.find
            if (last := find(self.last, at + len(self.first))) < 0:
                break
            spans.append((begin, at))
            begin = last + len(self.last)
        return [*spans, (begin, len(text))]


def deletions_of(words: Iterable[str], render: Render) -> tuple[Deletion, ...]:
    """What a template deletes: any of its own `words`, and text between two that it looks for."""
    found: dict[Deletion, None] = {}
    looked_for = []
    for word in words:
        written = {*_written(word, render)}
        if any(text is _TO_THE_END or len(text) < len(word) for text in written):
            looked_for.append(word)
        if "" in written:
            found[Deletion(word)] = None
        if _TO_THE_END in written:
            found[Deletion(word, is_longest=True)] = None
    for first, last in permutations(looked_for, 2):
        if "" in _written(f"{first}{_AMONG}{last}", render):
            found |= {Deletion(first, last, is_longest): None for is_longest in (False, True)}
    return tuple(found)


def _written(between: str, render: Render) -> Iterator[str | None]:
    """What a template writes for a text between two marks, in each place of a chat; `_TO_THE_END`
    if it has deleted the second mark."""
    for chat in _chats(f"{_BEFORE}{between}{_AFTER}"):
        _, *after = (render(chat) or "").split(_BEFORE)
        for rest in after:
            written, found, _ = rest.partition(_AFTER)
            yield written if found else _TO_THE_END


def _chats(text: str) -> Iterator[Chat]:
    """Two chats with a text in each place, one without calls: some templates take no tools."""
    begin, thought = (system(text), user(text)), {"reasoning_content": text}
    yield chat_of(*begin, assistant(text, **thought), user(text))
    yield chat_of(*begin, calling(text, content=text, **thought), result(text))


def shortened(text: str, deletions: Sequence[Deletion]) -> Iterator[tuple[str, Sequence[int]]]:
    """What deletions may leave of a text, with the original place of each character: after each
    alone, and after each step of all of them, twice, as one may join what another deletes."""
    whole: tuple[str, Sequence[int]] = text, range(len(text))
    for deletion in deletions:
        if (found := _without(whole, deletion)) is not whole:
            yield found
    left = whole
    for deletion in (*deletions, *deletions):
        if (found := _without(left, deletion)) is not left:
            left = found
            yield left


def _without(whole: tuple[str, Sequence[int]], deletion: Deletion) -> tuple[str, Sequence[int]]:
    text, places = whole
    if len(kept := deletion.kept(text)) == 1:
        return whole
    return (
        "".join(text[begin:end] for begin, end in kept),
        [place for begin, end in kept for place in places[begin:end]],
    )
