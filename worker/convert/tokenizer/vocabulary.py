"""The vocabulary: tokens by id, and everything else that a GGUF says about tokenization."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf.constants import Keys, TokenType

from worker.convert.family.rules import Metadata
from worker.errors import ModelError
from worker.llama import source_tokenizer

SPACE = "\u2581"
"""Stands for a space in SentencePiece's tokens, and begins a word in llama.cpp's WordPiece."""
_MOST_TOKENS = 1 << 20
"""Far more than any vocabulary has. Gaps between ids are filled, so ids need a bound."""
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<(pad|mask|unused\d+|reserved_\d+)>", re.DOTALL)
"""Texts that only a template should write, even if their definition does not call them special: in
a user's message they would forge a turn."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is split off before the tokenizer's model sees the text."""

    text: str
    special: bool
    lstrip: bool = False
    """The token absorbs the white space before it."""
    rstrip: bool = False
    """The token absorbs the white space after it."""
    normalized: bool = False
    """The token is searched for in the normalised text, not in the text itself."""

    @property
    def kind(self) -> TokenType:
        is_control = self.special or _LOOKS_SPECIAL.fullmatch(self.text)
        return TokenType.CONTROL if is_control else TokenType.USER_DEFINED


@dataclass(slots=True)
class Vocabulary:
    model: str
    """`tokenizer.ggml.model`: `gpt2` for byte-level BPE, `llama` for SentencePiece BPE, `t5` for
    Unigram, `bert` for WordPiece."""
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    pre: str = "default"
    scores: list[float] | None = None
    merges: list[str] | None = None
    special_ids: dict[str, int] = field(default_factory=dict)
    """The ids that the tokenizer's own file gives for `bos`, `eos` and `unk`."""
    steps: list[str] = field(default_factory=list)
    """Steps that the worker applies to a text before llama.cpp (see `llama.source_tokenizer`)."""
    split: list[str] = field(default_factory=list)
    """Expressions that the worker splits a text with (see `llama.source_tokenizer`)."""
    lstrip: set[int] = field(default_factory=set)
    rstrip: set[int] = field(default_factory=set)
    special_rstrip: bool = False
    """Whether a special token absorbs the white space after it, as Phi-3's do."""
    settings: Metadata = field(default_factory=dict)
    """Further `tokenizer.ggml.*` keys for this kind of tokenizer."""
    notes: list[str] = field(default_factory=list)

    def id_of(self, text: str) -> int | None:
        return self.tokens.index(text) if text in self.tokens else None

    def put(self, i: int, text: str, kind: int, score: float = -1000.0) -> None:
        """Place a token; lower ids without a token are filled with unused ones."""
        if not 0 <= i < _MOST_TOKENS:
            raise ModelError(f"token {text[:80]!r} has the id {i}, not 0 to {_MOST_TOKENS - 1:,}")
        self._extend(i + 1)
        self.tokens[i], self.types[i] = text, int(kind)
        if self.scores is not None:
            self.scores[i] = score

    def add(self, added: Mapping[int, AddedToken], size: int) -> None:
        """Place the added tokens; those beyond the embedding's `size` rows are left out."""
        surplus = [token.text for i, token in sorted(added.items()) if i >= size]
        if surplus:
            names = ", ".join(map(repr, surplus[:3])) + ("…" if len(surplus) > 3 else "")
            self.notes.append(
                f"left out {len(surplus)} added token(s) without a row in the embedding: {names}"
            )
        keeps_space = False
        for i, token in added.items():
            if i >= size:
                continue
            is_unknown = i < len(self.types) and self.types[i] == TokenType.UNKNOWN
            kind = TokenType.UNKNOWN if is_unknown else token.kind
            text = token.text
            if self.model in ("llama", "t5") and kind == TokenType.USER_DEFINED:
                if SPACE in text and not token.normalized and self.tokens[i : i + 1] == [text]:
                    keeps_space = True  # To the library it never matches spaces; merges make it.
                    continue
                # llama.cpp searches the text for these tokens before it replaces spaces.
                text = text.replace(SPACE, " ")
            self.put(i, text, kind)
            if token.lstrip:
                self.lstrip.add(i)
            if token.rstrip:
                self.rstrip.add(i)
                self.special_rstrip |= token.special
        if keeps_space:
            self.notes.append(
                "llama.cpp treats U+2581 in a text as a space; the tokenizer has added tokens of it"
            )

    def fit(self, size: int) -> None:
        """Fill up to the embedding's number of rows, which models round up.

        Raises:
            ModelError: there are more tokens than rows.
        """
        if len(self.tokens) > size:
            raise ModelError(
                f"the tokenizer has {len(self.tokens)} tokens, config.json's vocab_size is {size}"
            )
        self._extend(size)

    def _extend(self, size: int) -> None:
        missing = range(len(self.tokens), size)
        self.tokens += [f"[PAD{i}]" for i in missing]
        self.types += [int(TokenType.UNUSED)] * len(missing)
        if self.scores is not None:
            self.scores += [-10000.0] * len(missing)

    def metadata(self) -> Metadata:
        found: Metadata = {}
        # Before the vocabulary, where the worker looks for them.
        if self.split:
            found[source_tokenizer.SPLIT] = json.dumps(self.split, ensure_ascii=False)
        if self.steps:
            found[source_tokenizer.STEPS] = " ".join(self.steps)
        found |= {
            Keys.Tokenizer.MODEL: self.model,
            Keys.Tokenizer.PRE: self.pre,
            Keys.Tokenizer.LIST: self.tokens,
            Keys.Tokenizer.TOKEN_TYPE: self.types,
        }
        if self.scores is not None:
            found[Keys.Tokenizer.SCORES] = self.scores
        if self.merges is not None:
            found[Keys.Tokenizer.MERGES] = self.merges
        for key, words in (
            (source_tokenizer.LSTRIP, sorted(self.lstrip)),
            (source_tokenizer.RSTRIP, sorted(self.rstrip)),
        ):
            if words:
                found[key] = " ".join(map(str, words))
        return found | self.settings


def merges_of(tokenizer: Mapping[str, Any]) -> list[list[str]]:
    """The pairs that the BPE of a `tokenizer.json` merges; older files have each as one text."""
    found = tokenizer["model"].get("merges", [])
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in found]
