"""Splits a text into words as a model's own tokenizer does, if llama.cpp's expressions differ.

llama.cpp only approximates the classes of case and combining marks of some pre-tokenizers. The
converter writes the original expressions into a GGUF. `Model` then has the `tokenizers` library
split a text with them, and llama.cpp merge one word at a time.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping

from worker.errors import ModelError

SPLIT = "llorch.tokenizer.split"
"""The key of a JSON list of expressions, each of which splits the parts that the one before left.
It precedes the vocabulary in the file."""
WHOLE_WORDS = "whole-words"
"""A step of `source_text`: a word that is a token is taken without merging."""
NEUTRAL = "superbpe"
"""A pre-tokenizer of llama.cpp that splits only at numbers, so it leaves such words whole."""

_HEAD_BYTES = 1 << 20
"""Far more than precedes a vocabulary."""
_STRING = 8
_MAX_CACHED_WORDS = 1 << 16
_MAX_CACHED_CHARS = 32


def recorded_split(path: str) -> str | None:
    """The value of `SPLIT` in a GGUF, read before llama.cpp loads it; `None` for most models."""
    key = len(SPLIT).to_bytes(8, "little") + SPLIT.encode() + _STRING.to_bytes(4, "little")
    try:
        with open(path, "rb") as file:
            size = min(_HEAD_BYTES, os.fstat(file.fileno()).st_size)
            if not size:
                return None
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as head:
                at = head.find(key)
                if at < 0:
                    return None
                start = at + len(key) + 8
                length = int.from_bytes(head[start - 8 : start], "little")
                return head[start : start + length].decode("utf-8", "replace")
    except OSError:
        return None  # llama.cpp reports what is wrong with the file.


class SourceWords:
    """Tokenises texts without special tokens."""

    def __init__(
        self,
        split: str,
        encode: Callable[[str], list[int]],
        whole: Mapping[bytes, int],
    ) -> None:
        """`split` is the file's value of `SPLIT`. `encode` gives llama.cpp's ids of one word.
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
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        found: list[int] = []
        for word, _ in self._split.pre_tokenize_str(text):
            found += self._known.get(word) or self._ids_of(word)
        return found

    def _ids_of(self, word: str) -> list[int]:
        whole = self._whole.get(word.encode())
        ids = self._encode(word) if whole is None else [whole]
        if len(word) <= _MAX_CACHED_CHARS:
            if len(self._known) >= _MAX_CACHED_WORDS:
                self._known.clear()
            self._known[word] = ids
        return ids
