"""The vocabulary of a checkpoint as GGUF metadata.

Reads `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
`generation_config.json` and the chat template files; no tokenizer library is needed to do so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from worker.convert import pre_tokenizers
from worker.convert.architectures import Metadata
from worker.convert.checkpoint import Checkpoint, read_json
from worker.errors import ModelError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(slots=True)
class Vocabulary:
    """Tokens by id, and everything else that text needs to become ids."""

    model: str
    """`tokenizer.ggml.model`: `gpt2` for byte-level BPE, `llama` for SentencePiece, `t5` for
    Unigram."""
    tokens: list[str]
    types: list[int]
    pre: str = "default"
    scores: list[float] | None = None
    merges: list[str] | None = None
    settings: Metadata = field(default_factory=dict)
    """Further `tokenizer.ggml.*` keys that the kind of tokenizer has."""

    def id_of(self, text: str) -> int | None:
        try:
            return self.tokens.index(text)
        except ValueError:
            return None

    def fit(self, size: int) -> None:
        """Fill up to the embedding's rows: models round their vocabulary up.

        Raises:
            ModelError: there are more tokens than rows.
        """
        if len(self.tokens) > size:
            raise ModelError(
                f"the tokenizer has {len(self.tokens)} tokens, config.json's vocab_size is {size}"
            )
        for i in range(len(self.tokens), size):
            self.tokens.append(f"[PAD{i}]")
            self.types.append(TokenType.UNUSED)
            if self.scores is not None:
                self.scores.append(-1000.0)

    def metadata(self) -> Metadata:
        found: Metadata = {
            "tokenizer.ggml.model": self.model,
            "tokenizer.ggml.pre": self.pre,
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": [int(t) for t in self.types],
        }
        if self.scores is not None:
            found["tokenizer.ggml.scores"] = self.scores
        if self.merges is not None:
            found["tokenizer.ggml.merges"] = self.merges
        return found | self.settings


def read_vocabulary(checkpoint: Checkpoint, vocab_size: int, pre: str | None = None) -> Vocabulary:
    """`pre` overrides what the pre-tokenizer's definition says.

    Raises:
        ModelError: the tokenizer is absent, malformed or of a kind that llama.cpp does not have.
    """
    path = checkpoint.folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{checkpoint.folder} has no tokenizer.json", path=str(path))
    tokenizer = read_json(path)
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise ModelError(f"{path} has no model with a vocab", path=str(path))
    if model.get("type") == "BPE" and not model.get("byte_fallback"):
        vocabulary = _byte_level_bpe(tokenizer, pre)
    else:
        raise ModelError(
            f"{path}: a tokenizer of type {model.get('type')} cannot be converted", path=str(path)
        )
    vocabulary.fit(vocab_size)
    _check_unique(vocabulary, path)
    return vocabulary


def _byte_level_bpe(tokenizer: Mapping[str, Any], pre: str | None) -> Vocabulary:
    model = tokenizer["model"]
    vocabulary = Vocabulary(
        model="gpt2",
        pre=pre or pre_tokenizers.recognise(tokenizer),
        merges=[m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])],
        tokens=[],
        types=[],
    )
    _place(vocabulary, model["vocab"])
    _place_added(vocabulary, tokenizer.get("added_tokens") or [])
    return vocabulary


def _place(vocabulary: Vocabulary, vocab: Mapping[str, int]) -> None:
    size = max(vocab.values(), default=-1) + 1
    if sorted(vocab.values()) != list(range(size)):
        # Holes are legal: ids of added tokens may lie between those of the model.
        size = max(size, len(vocab))
    vocabulary.tokens = [f"[PAD{i}]" for i in range(size)]
    vocabulary.types = [int(TokenType.UNUSED)] * size
    for text, i in vocab.items():
        vocabulary.tokens[i] = text
        vocabulary.types[i] = TokenType.NORMAL


def _place_added(vocabulary: Vocabulary, added: list[Any]) -> None:
    for entry in added:
        i, text = entry["id"], entry["content"]
        while len(vocabulary.tokens) <= i:
            vocabulary.tokens.append(f"[PAD{len(vocabulary.tokens)}]")
            vocabulary.types.append(TokenType.UNUSED)
        vocabulary.tokens[i] = text
        special = entry.get("special", False)
        vocabulary.types[i] = TokenType.CONTROL if special else TokenType.USER_DEFINED


def _check_unique(vocabulary: Vocabulary, path: Path) -> None:
    """llama.cpp aborts its process on a text that two ids share."""
    seen: dict[str, int] = {}
    for i, text in enumerate(vocabulary.tokens):
        if text in seen:
            raise ModelError(f"{path}: tokens {seen[text]} and {i} are both {text!r}")
        seen[text] = i
