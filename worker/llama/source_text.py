"""The steps of a model's own tokenizer that llama.cpp lacks.

The converter writes them into a GGUF as three texts, and `Model.tokenize` applies them before
llama.cpp sees a text. Special tokens are split off first, as in the source's tokenizer: a combining
mark after `<|im_end|>` must not change the `>`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Literal

STEPS = "llorch.tokenizer.steps"
"""The key of a list of words. `nfc`, `nfkc`, `nfd` and `nfkd` normalise. `space-first` adds a space
before a text, `space-each` also after each special token, both only where there is none.
`whole-words` is for `source_words`."""
LSTRIP, RSTRIP = "llorch.tokenizer.lstrip", "llorch.tokenizer.rstrip"
"""The keys of the ids of tokens that take the white space before or after them along."""

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: Mapping[str, Form] = {"nfc": "NFC", "nfd": "NFD", "nfkc": "NFKC", "nfkd": "NFKD"}


class SourceText:
    """Splits a text at its special tokens and prepares the texts between them."""

    def __init__(
        self,
        steps: Iterable[str],
        lstrip: Iterable[int],
        rstrip: Iterable[int],
        special: Mapping[str, int],
        added: Mapping[str, int],
    ) -> None:
        """`special` has the control tokens by text, `added` those that are found in any text."""
        steps = list(steps)
        self._forms = [_FORMS[step] for step in steps if step in _FORMS]
        self._space = next((step for step in steps if step.startswith("space-")), "")
        self._lstrip, self._rstrip = frozenset(lstrip), frozenset(rstrip)
        self._ids = {**special, **added}
        self._with_special, self._without = _pattern(self._ids), _pattern(added)

    def split(self, text: str, *, parse_special: bool) -> list[int | str]:
        """Token ids, and the texts between them that llama.cpp tokenises."""
        pattern = self._with_special if parse_special else self._without
        parts: list[int | str] = [text]
        if pattern is not None:
            pieces = pattern.split(text)
            parts = [self._ids[p] if i % 2 else p for i, p in enumerate(pieces)]
        found: list[int | str] = []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                part = self._prepared(part, parts[i - 1] if i else None, parts[i + 1 : i + 2])
                if not part:
                    continue
            found.append(part)
        return found

    def _prepared(self, text: str, before: int | str | None, behind: list[int | str]) -> str:
        if before in self._rstrip:
            text = text.lstrip()
        if behind and behind[0] in self._lstrip:
            text = text.rstrip()
        for form in self._forms:
            text = unicodedata.normalize(form, text)
        wants_space = self._space == "space-each" or (self._space and before is None)
        return f" {text}" if wants_space and text and not text.startswith(" ") else text


def _pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    texts = sorted((text for text in tokens if text), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
