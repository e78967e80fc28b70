"""DRY's sequence breakers in a model's tokens, as llama.cpp finds them. Any thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

from worker.llama.model import Model
from worker.llama.penalties import Breakers

_MOST_BYTES = 40
_MOST_TOKENS = 20


def breakers_of(model: Model, texts: Iterable[str]) -> Breakers:
    """The tokens with which a breaker may begin, and what follows them: nothing if the token has
    all of it, else the tokens of the rest. A text longer than 40 bytes is cut."""
    found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for text in filter(None, texts):
        for token, rest in _of(model, text.encode()[:_MOST_BYTES]):
            if rest not in found[token]:
                found[token].append(rest)
    return dict(found)


@lru_cache(maxsize=64)
def _of(model: Model, text: bytes) -> tuple[tuple[int, tuple[int, ...]], ...]:
    beginnings = tuple(text[:n] for n in range(1, len(text)))
    rests = {part: tuple(model.tokenize_bytes(text[len(part) :])) for part in beginnings}
    found: list[tuple[int, tuple[int, ...]]] = []
    for token, word in enumerate(_words(model)):
        if text in word:
            found.append((token, ()))
        elif beginnings and word.endswith(beginnings):
            found += [
                (token, rest[:_MOST_TOKENS]) for part, rest in rests.items() if word.endswith(part)
            ]
    return tuple(found)


@lru_cache(maxsize=1)
def _words(model: Model) -> tuple[bytes, ...]:
    return tuple(model.words())
