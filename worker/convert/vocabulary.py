"""Tokens by id, and everything else that a GGUF says about how text becomes ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from worker.convert.architectures import Metadata
from worker.errors import ModelError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before the tokenizer's model sees it."""

    text: str
    special: bool
    eats_spaces_behind: bool = False


@dataclass(slots=True)
class Vocabulary:
    model: str
    """`tokenizer.ggml.model`: `gpt2` for byte-level BPE, `llama` for SentencePiece BPE, `t5` for
    Unigram."""
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    pre: str = "default"
    scores: list[float] | None = None
    merges: list[str] | None = None
    special_ids: dict[str, int] = field(default_factory=dict)
    """What the tokenizer's own file says of `bos`, `eos` and `unk`."""
    eats_spaces_behind: bool = False
    """Special tokens swallow the white space behind them, as Phi-3's do."""
    settings: Metadata = field(default_factory=dict)
    """Further `tokenizer.ggml.*` keys that the kind of tokenizer has."""

    def id_of(self, text: str) -> int | None:
        try:
            return self.tokens.index(text)
        except ValueError:
            return None

    def put(self, i: int, text: str, kind: int, score: float = -1000.0) -> None:
        """Place a token; ids up to it that have none are filled."""
        self._extend(i + 1)
        self.tokens[i], self.types[i] = text, int(kind)
        if self.scores is not None:
            self.scores[i] = score

    def add(self, added: Mapping[int, AddedToken]) -> None:
        for i, token in added.items():
            kind = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
            if i < len(self.types) and self.types[i] == TokenType.UNKNOWN:
                kind = TokenType.UNKNOWN
            text = token.text
            if self.model != "gpt2" and kind == TokenType.USER_DEFINED:
                # llama.cpp looks for it in the text as it was given.
                text = text.replace("\u2581", " ")
            self.put(i, text, kind)
        self.eats_spaces_behind = any(t.eats_spaces_behind and t.special for t in added.values())

    def fit(self, size: int) -> None:
        """Fill up to the embedding's rows: models round their vocabulary up.

        Raises:
            ModelError: there are more tokens than rows.
        """
        if len(self.tokens) > size:
            raise ModelError(
                f"the tokenizer has {len(self.tokens)} tokens, config.json's vocab_size is {size}"
            )
        self._extend(size)

    def _extend(self, size: int) -> None:
        for i in range(len(self.tokens), size):
            self.tokens.append(f"[PAD{i}]")
            self.types.append(int(TokenType.UNUSED))
            if self.scores is not None:
                self.scores.append(-10000.0)

    def metadata(self) -> Metadata:
        found: Metadata = {
            "tokenizer.ggml.model": self.model,
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": self.types,
        }
        if self.scores is not None:
            found["tokenizer.ggml.scores"] = self.scores
        if self.merges is not None:
            found["tokenizer.ggml.merges"] = self.merges
        return found | self.settings
