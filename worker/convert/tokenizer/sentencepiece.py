"""SentencePiece vocabularies, from `tokenizer.model` or from its form in a `tokenizer.json`.

For BPE, llama.cpp merges the pair with the best-scored result, so every token needs a score. For
Unigram, it uses the tokens' log-probabilities.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from gguf.constants import Keys, TokenType

from worker.convert.family.rules import Metadata
from worker.convert.tokenizer.pre_tokenizers import steps_of
from worker.convert.tokenizer.protobuf import SentencePieceModel
from worker.convert.tokenizer.vocabulary import SPACE, Vocabulary, merges_of
from worker.errors import ModelError

_BPE = 2


def scheme_of(model: SentencePieceModel, settings: Mapping[str, Any]) -> str:
    """A scheme of `_prepend_scheme` for a `tokenizer.model` alone. It follows from `settings`, the
    `tokenizer_config.json`, as in transformers."""
    if not model.add_dummy_prefix or settings.get("add_prefix_space") is False:
        return "never"
    is_new = model.algorithm == _BPE and settings.get("legacy") is False
    return "first" if is_new else "always"


def from_model(model: SentencePieceModel, settings: Mapping[str, Any]) -> Vocabulary:
    if model.algorithm not in (1, _BPE):
        raise ModelError("tokenizer.model is neither a Unigram nor a BPE model")
    unigram = model.algorithm != _BPE
    vocabulary = Vocabulary(model="t5" if unigram else "llama", scores=[])
    for i, piece in enumerate(model.pieces):
        # llama.cpp searches the text for user-defined pieces before it replaces spaces.
        user_defined = piece.kind == TokenType.USER_DEFINED
        text = piece.text.replace(SPACE, " ") if user_defined else piece.text
        vocabulary.put(i, text, piece.kind, piece.score)
    for role, i in (("bos", model.bos_id), ("eos", model.eos_id), ("unk", model.unk_id)):
        if 0 <= i < len(model.pieces):
            vocabulary.special_ids[role] = i
    _set_prefix(vocabulary, scheme_of(model, settings))
    if unigram:
        vocabulary.settings[Keys.Tokenizer.REMOVE_EXTRA_WS] = model.remove_extra_whitespaces
        if model.charsmap:
            vocabulary.settings[Keys.Tokenizer.PRECOMPILED_CHARSMAP] = model.charsmap
    return vocabulary


def from_bpe_json(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a `tokenizer.json` with BPE and byte fallback: a SentencePiece model."""
    model = tokenizer["model"]
    merges = merges_of(tokenizer)
    # A token's rank is that of the first merge that makes it.
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    vocabulary = Vocabulary(model="llama", scores=[])
    for text, i in sorted(model["vocab"].items(), key=lambda item: item[1]):
        score = -float(ranks[text]) if text in ranks else -float(len(merges))
        vocabulary.put(i, text, _kind(text, model.get("unk_token")), score)
    if (unk := model["vocab"].get(model.get("unk_token"))) is not None:
        vocabulary.special_ids["unk"] = unk
    _set_prefix(vocabulary, _prepend_scheme(tokenizer))
    return vocabulary


def by_merges(tokenizer: Mapping[str, Any]) -> Metadata:
    """The keys of llama.cpp's tokenizer for Gemma 4; other readers go by the scores instead."""
    merges = [" ".join(pair) for pair in merges_of(tokenizer)]
    return {Keys.Tokenizer.MODEL: "gemma4", Keys.Tokenizer.MERGES: merges}


def from_unigram_json(tokenizer: Mapping[str, Any]) -> Vocabulary:
    model = tokenizer["model"]
    unk = model.get("unk_id")
    vocabulary = Vocabulary(model="t5", scores=[])
    for i, (text, score) in enumerate(model["vocab"]):
        kind = TokenType.UNKNOWN if i == unk else _kind(text, None)
        vocabulary.put(i, text, kind, float(score))
    if unk is not None:
        vocabulary.special_ids["unk"] = unk
    _set_prefix(vocabulary, _prepend_scheme(tokenizer))
    vocabulary.settings[Keys.Tokenizer.REMOVE_EXTRA_WS] = _squeezes_spaces(tokenizer)
    for step in steps_of(tokenizer.get("normalizer"), "Precompiled"):
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
        vocabulary.settings.setdefault(Keys.Tokenizer.PRECOMPILED_CHARSMAP, charsmap)
    return vocabulary


def _kind(text: str, unk: str | None) -> TokenType:
    if text == unk:
        return TokenType.UNKNOWN
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return TokenType.BYTE
    return TokenType.NORMAL


def _set_prefix(vocabulary: Vocabulary, scheme: str) -> None:
    """Set how a text's first word gets its space, by a scheme of `_prepend_scheme`.

    llama.cpp adds a space before a text and after each special token, even if there is one
    already. A `Metaspace` adds it only if there is none. For BPE, the worker therefore adds it
    instead of llama.cpp; other programs let llama.cpp add it, which is right for most texts.
    """
    if scheme in ("first", "each") and vocabulary.model == "llama":
        vocabulary.steps.append(f"space-{scheme}")
    vocabulary.settings[Keys.Tokenizer.ADD_PREFIX] = scheme != "never"


def _prepend_scheme(tokenizer: Mapping[str, Any]) -> str:
    """`always` (even if there is a space), or for a `Metaspace` `first`, `each` or `never`."""
    if any(s.get("prepend") == SPACE for s in steps_of(tokenizer.get("normalizer"), "Prepend")):
        return "always"
    for step in steps_of(tokenizer.get("pre_tokenizer"), "Metaspace"):
        default = "always" if step.get("add_prefix_space", True) else "never"
        scheme = str(step.get("prepend_scheme") or default)
        return "each" if scheme == "always" else scheme
    return "never"


def _squeezes_spaces(tokenizer: Mapping[str, Any]) -> bool:
    steps = steps_of(tokenizer.get("normalizer"), "Replace")
    runs = [{"Regex": expression} for expression in (" {2,}", r"\s+", r"\s{2,}")]
    cuts = steps_of(tokenizer.get("pre_tokenizer"), "WhitespaceSplit")
    return any(step.get("pattern") in runs for step in steps) or any(cuts)
