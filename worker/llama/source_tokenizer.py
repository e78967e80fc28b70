"""What a model's own tokenizer does to a text and llama.cpp's does not.

The converter records it in a GGUF as a few texts, and `Model.tokenize` uses this tokenizer for such
models. Special tokens are split off first, as in the source's tokenizer: a combining mark after
`<|im_end|>` must not change the `>`. The texts between them are normalised. If llama.cpp only
approximates a pre-tokenizer's classes of case and combining marks, they are also split into words
by the original expressions, and llama.cpp merges one word at a time. Any thread.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Literal

from worker.errors import ModelError

STEPS = "llorch.tokenizer.steps"
"""The key of a list of words. `nfc`, `nfkc`, `nfd` and `nfkd` normalise. `space-first` adds a space
before a text, `space-each` also after each special token, unless there is one; llama.cpp then adds
none. Other readers of the file go by its `add_space_prefix`. `whole-words` takes a word that is
itself a token without merging."""
LSTRIP, RSTRIP = "llorch.tokenizer.lstrip", "llorch.tokenizer.rstrip"
"""The keys of the ids of tokens that strip the white space before or after them."""
SPLIT = "llorch.tokenizer.split"
"""The key of a JSON list of regular expressions, each of which splits the parts that the previous
one produced. It precedes the vocabulary in the file."""
WHOLE_WORDS = "whole-words"
NEUTRAL = "superbpe"
"""A pre-tokenizer of llama.cpp that splits only at numbers, so it leaves such words whole."""

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: Mapping[str, Form] = {"nfc": "NFC", "nfd": "NFD", "nfkc": "NFKC", "nfkd": "NFKD"}
_WHITE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")
"""Unicode's white space; Python's `isspace` also accepts four separators."""
_HEAD_BYTES = 1 << 20
"""Far more than precedes a vocabulary."""
_STRING = 8
_MOST_NESTED = 64
"""How deep groups nest in an expression, as Python's compiler recurses into each."""
_MAX_CACHED_WORDS = 1 << 16
_MAX_CACHED_CHARS = 32


class SourceTokenizer:
    def __init__(
        self,
        steps: Iterable[str],
        lstrip: Iterable[int],
        rstrip: Iterable[int],
        special: Mapping[str, int],
        added: Mapping[str, int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`special` has the control tokens by text, `added` those that are found in any text.
        `encode` returns the ids of a prepared text between special tokens."""
        steps = list(steps)
        self._forms = [_FORMS[step] for step in steps if step in _FORMS]
        self._space = next((step for step in steps if step.startswith("space-")), "")
        self._lstrip, self._rstrip = frozenset(lstrip), frozenset(rstrip)
        self._ids = {**special, **added}
        self._with_special, self._without = any_of(self._ids), any_of(added)
        self._encode = encode

    def ids(self, text: str, *, parse_special: bool) -> list[int]:
        found: list[int] = []
        start, before = 0, None
        for match in (self._with_special if parse_special else self._without).finditer(text):
            token = self._ids[match[0]]
            found += self._ids_between(before, text[start : match.start()], token)
            found.append(token)
            start, before = match.end(), token
        return found + self._ids_between(before, text[start:], None)

    def _ids_between(self, before: int | None, text: str, after: int | None) -> list[int]:
        """The ids of a text between two special tokens; `None` is an end of the whole text."""
        if before in self._rstrip:
            text = text.lstrip(_WHITE)
        if after in self._lstrip:
            text = text.rstrip(_WHITE)
        for form in self._forms:
            text = unicodedata.normalize(form, text)
        wants_space = self._space == "space-each" or (self._space and before is None)
        if wants_space and text and not text.startswith((" ", "\u2581")):
            text = f" {text}"
        return self._encode(text) if text else []


class SourceWords:
    """Tokenises texts without special tokens, word by word."""

    def __init__(
        self,
        split: str,
        encode: Callable[[str], list[int]],
        whole: Mapping[bytes, int],
    ) -> None:
        """`split` is the file's value of `SPLIT`. `encode` returns llama.cpp's ids of one word.
        `whole` has the ids of words that are taken without merging.

        Raises:
            ModelError: `split` is not a list of expressions.
        """
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import Sequence, Split

        try:
            expressions = json.loads(split)
            steps = [Split(Regex(expression), "isolated") for expression in expressions]
        except Exception as error:  # The library raises no narrower class.
            raise ModelError(f"{SPLIT} must be a JSON list of expressions: {error}") from None
        self._split = Sequence(steps)
        self._encode, self._whole = encode, whole
        self._cached = lru_cache(_MAX_CACHED_WORDS)(self._ids_of)

    def ids(self, text: str) -> list[int]:
        found: list[int] = []
        for word, _ in self._split.pre_tokenize_str(text):
            found += self._cached(word) if len(word) <= _MAX_CACHED_CHARS else self._ids_of(word)
        return found

    def _ids_of(self, word: str) -> list[int]:
        whole = self._whole.get(word.encode())
        return self._encode(word) if whole is None else [whole]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of the texts at a position; without texts, it never does.

    A vocabulary may have thousands of texts that begin with `<unused`, so the pattern is a trie. To
    try one text after another would take some 50 µs at each `<` of a page, while no other thread
    runs.
    """
    ordered = sorted({*filter(None, texts)})
    return re.compile(_either(ordered, _MOST_NESTED) if ordered else "(?!)")


def _either(texts: list[str], most_nested: int) -> str:
    """The expression for any of these texts, which are sorted and distinct."""
    common = commonprefix([texts[0], texts[-1]])
    rests = [text[len(common) :] for text in texts]
    is_optional = not rests[0]
    if is_optional and not (rests := rests[1:]):
        return re.escape(common)
    if most_nested:
        by_first = groupby(rests, key=itemgetter(0))
        ways = [_either(list(group), most_nested - 1) for _, group in by_first]
    else:
        ways = [re.escape(rest) for rest in sorted(rests, key=len, reverse=True)]
    return f"{re.escape(common)}(?:{'|'.join(ways)}){'?' * is_optional}"


def recorded(path: str, key: str) -> str | None:
    """The value of `SPLIT` or `STEPS` in a GGUF, read before llama.cpp loads it; `None` for most
    models."""
    wanted = len(key).to_bytes(8, "little") + key.encode() + _STRING.to_bytes(4, "little")
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None  # llama.cpp reports what is wrong with the file.
    _, found, rest = head.partition(wanted)
    return rest[8 : 8 + int.from_bytes(rest[:8], "little")].decode("utf-8", "replace") or None
