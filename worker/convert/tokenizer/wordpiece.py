"""WordPiece vocabularies, as BERT has them, from `tokenizer.json`.

llama.cpp marks the pieces that begin a word; `tokenizer.json` marks those that continue one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf.constants import TokenType

from worker.convert.tokenizer.definition import steps_of
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.errors import ModelError

_WORD_START = "\u2581"


def from_json(tokenizer: Mapping[str, Any]) -> Vocabulary:
    model = tokenizer["model"]
    prefix = model.get("continuing_subword_prefix", "##")
    vocabulary = Vocabulary(model="bert")
    for text, i in sorted(model["vocab"].items(), key=lambda item: item[1]):
        inside = text.startswith(prefix)
        form = text.removeprefix(prefix) if inside else _WORD_START + text
        vocabulary.put(i, form, TokenType.NORMAL)
    if (unk := model["vocab"].get(model.get("unk_token"))) is not None:
        vocabulary.special_ids["unk"] = unk
    _set_normalizer(vocabulary, tokenizer)
    return vocabulary


def _set_normalizer(vocabulary: Vocabulary, tokenizer: Mapping[str, Any]) -> None:
    for step in steps_of(tokenizer.get("normalizer")):
        if step.get("type") != "BertNormalizer":
            continue
        if not (step.get("clean_text", True) and step.get("handle_chinese_chars", True)):
            raise ModelError("tokenizer.json: llama.cpp always cleans texts as BERT does")
        lowercase = bool(step.get("lowercase", True))
        accents = step.get("strip_accents")
        vocabulary.settings["tokenizer.ggml.normalizer.lowercase"] = lowercase
        vocabulary.settings["tokenizer.ggml.normalizer.strip_accents"] = (
            lowercase if accents is None else bool(accents)
        )
