"""Byte-level BPE vocabularies, from `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf.constants import TokenType

from worker.convert.tokenizer import pre_tokenizers
from worker.convert.tokenizer.definition import steps_of
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.llama.source_words import WHOLE_WORDS

_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def from_json(tokenizer: Mapping[str, Any], pre: str | None) -> Vocabulary:
    """Read the vocabulary; `pre` replaces the recognised pre-tokenizer."""
    model = tokenizer["model"]
    vocabulary = Vocabulary(
        model="gpt2",
        pre=pre or pre_tokenizers.recognise(tokenizer),
        merges=[m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])],
    )
    for text, i in sorted(model["vocab"].items(), key=lambda item: item[1]):
        vocabulary.put(i, text, TokenType.NORMAL)
    for step in steps_of(tokenizer.get("normalizer")):
        if step.get("type") in _NORMAL_FORMS:
            vocabulary.steps.append(str(step["type"]).lower())
    vocabulary.split = pre_tokenizers.split_of(vocabulary.pre)
    if vocabulary.split and model.get("ignore_merges"):
        vocabulary.steps.append(WHOLE_WORDS)
    return vocabulary
