"""Finds the kind of a checkpoint's tokenizer and reads its vocabulary.

Parses `tokenizer.json`, `tokenizer.model`, `tiktoken.model`, `tekken.json`, `added_tokens.json` and
`tokenizer_config.json`. `check` compares the result with the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from worker.convert.checkpoint import Checkpoint
from worker.convert.malformed import bounded_faults
from worker.convert.tokenizer import definition, sentencepiece
from worker.convert.tokenizer.pre_tokenizers import steps_of
from worker.convert.tokenizer.protobuf import read_model
from worker.convert.tokenizer.ranked import TEKKEN, TIKTOKEN, ranked_definition, tekken_override
from worker.convert.tokenizer.vocabulary import SPACE, AddedToken, Vocabulary
from worker.errors import ModelError
from worker.models.checkpoint_files import TOKENIZERS
from worker.models.gguf.servable import missing_byte

_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_SPLITS_LIKE_KIMI = ("kimi_k2", "kimi_k25", "deepseek_v3")
"""`model_type` of Kimi K2 and of the smaller Moonlight, which splits text in the same way."""


def read_vocabulary(checkpoint: Checkpoint, vocab_size: int, pre: str | None = None) -> Vocabulary:
    """Read the vocabulary; `pre` replaces the pre-tokenizer that the definition gives.

    Raises:
        ModelError: the tokenizer is absent, malformed or of a kind that llama.cpp does not have.
    """
    with bounded_faults(checkpoint.folder):
        tokenizer = checkpoint.json("tokenizer.json") or ranked_definition(checkpoint)
        cuts = tekken_override(checkpoint, tokenizer)
        if cuts:
            tokenizer = {**tokenizer, "pre_tokenizer": cuts}
        vocabulary = _read(checkpoint, tokenizer, pre)
        if cuts:
            vocabulary.notes.append(
                f"texts are split as {TEKKEN} says, not as the tokenizer.json beside it does"
            )
        if vocabulary.model != "bert":  # Its normalizer has no such steps.
            forms = steps_of(tokenizer.get("normalizer"), *_NORMAL_FORMS)
            vocabulary.steps += (str(step["type"]).lower() for step in forms)
        vocabulary.notes += _replaced_tokens(tokenizer)
        vocabulary.add(_added_tokens(checkpoint, tokenizer), vocab_size)
    vocabulary.fit(vocab_size)
    _check_unique(vocabulary, checkpoint.folder)
    if vocabulary.model == "llama":
        _check_bytes(vocabulary, checkpoint.folder)
    return vocabulary


def _read(checkpoint: Checkpoint, tokenizer: Mapping[str, Any], pre: str | None) -> Vocabulary:
    folder, model = checkpoint.folder, tokenizer.get("model")
    if not checkpoint.json("tokenizer.json") and (folder / TIKTOKEN).is_file():
        if checkpoint.config.get("model_type") not in _SPLITS_LIKE_KIMI:
            raise ModelError(
                f"{folder}: only Python code says how to split texts for its {TIKTOKEN}, "
                f"and only that of {', '.join(_SPLITS_LIKE_KIMI)} is known"
            )
    kind, has_bytes = (model.get("type"), model.get("byte_fallback")) if model else (None, None)
    if kind == "WordPiece":
        return definition.wordpiece(tokenizer)
    if kind == "BPE":
        _check_bpe(tokenizer)
        # After ByteLevel every character has a token, so byte_fallback never applies.
        if not has_bytes or any(steps_of(tokenizer.get("pre_tokenizer"), "ByteLevel")):
            return definition.byte_level(tokenizer, pre)
        if tokenizer["model"].get("ignore_merges"):
            definition.check_merged(tokenizer)
        return sentencepiece.from_bpe_json(tokenizer)
    if kind == "Unigram":
        return sentencepiece.from_unigram_json(tokenizer)
    path = folder / "tokenizer.model"
    if not model and path.is_file():
        settings = checkpoint.json("tokenizer_config.json")
        return sentencepiece.from_model(read_model(path.read_bytes(), str(path)), settings)
    if not model:
        raise ModelError(f"{folder} has none of {', '.join(TOKENIZERS)}")
    raise ModelError(
        f"{folder / 'tokenizer.json'}: a tokenizer of type {kind} cannot "
        "be converted; byte-level BPE, SentencePiece BPE, Unigram and WordPiece can"
    )


def _check_bpe(tokenizer: Mapping[str, Any]) -> None:
    """Refuse what the texts of `check` might not reveal: replacements of characters that none of
    them has, and rare BPE dropout."""
    for step in steps_of(tokenizer.get("normalizer"), "Replace"):
        if (step.get("pattern"), step.get("content")) != ({"String": " "}, SPACE):
            raise ModelError(
                f"tokenizer.json: its normalizer replaces {step.get('pattern')} by "
                f"{step.get('content')!r}, which llama.cpp does not do"
            )
    if dropout := tokenizer["model"].get("dropout"):
        raise ModelError(
            f"tokenizer.json: its model skips merges at random (dropout is {dropout}), so a text "
            "has different tokens each time; set dropout to null, as after training"
        )


def _added_tokens(checkpoint: Checkpoint, tokenizer: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The added tokens of every file that may list them; `tokenizer.json` overrides the others."""
    found: dict[int, AddedToken] = {}
    special = _special_texts(checkpoint)
    for text, i in checkpoint.json("added_tokens.json").items():
        found[i] = AddedToken(text, special=text in special)
    decoder = checkpoint.json("tokenizer_config.json").get("added_tokens_decoder") or {}
    for i, entry in decoder.items():
        found[int(i)] = _added(entry)
    for entry in tokenizer.get("added_tokens") or []:
        found[entry["id"]] = _added(entry)
    return found


def _special_texts(checkpoint: Checkpoint) -> set[str]:
    """The texts of tokens with a role. `added_tokens.json` does not mark special tokens; like
    transformers, this takes those with a role for special."""
    found: set[str] = set()
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in checkpoint.json(file).items():
            if key.endswith(("_token", "special_tokens")):
                each = value if isinstance(value, list) else [value]
                texts = [
                    entry.get("content") if isinstance(entry, dict) else entry for entry in each
                ]
                found.update(text for text in texts if isinstance(text, str))
    return found


def _replaced_tokens(tokenizer: Mapping[str, Any]) -> list[str]:
    """Notes on tokens that an added token of the same id replaces.

    Raises:
        ModelError: two texts in one list have the same id; llama.cpp would know only the second.
    """
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    is_list = isinstance(vocab, list)  # its indices are the ids
    texts = _by_id(((e[0], i) for i, e in enumerate(vocab)) if is_list else vocab.items())
    added = _by_id((e["content"], e["id"]) for e in tokenizer.get("added_tokens") or [])
    return [
        f"the token {texts[i]!r} is left out: the added token {text!r} has its id, {i}"
        for i, text in added.items()
        if texts.get(i, text) != text
    ]


def _by_id(tokens: Iterable[tuple[str, int]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for text, i in tokens:
        if found.setdefault(i, text) != text:
            raise ModelError(f"tokenizer.json: {found[i]!r} and {text!r} both have the id {i}")
    return found


def _added(entry: Mapping[str, Any]) -> AddedToken:
    if entry.get("single_word"):
        raise ModelError(
            f"tokenizer.json: the added token {entry['content']!r} matches only whole words "
            "(single_word); llama.cpp would match it within words, too"
        )
    flags = {key: bool(entry.get(key)) for key in ("special", "lstrip", "rstrip", "normalized")}
    return AddedToken(entry["content"], **flags)


def _check_unique(vocabulary: Vocabulary, folder: Path) -> None:
    """Refuse a text that two ids share: llama.cpp would abort its process."""
    last = {text: i for i, text in enumerate(vocabulary.tokens)}
    for i, text in enumerate(vocabulary.tokens):
        if last[text] != i:
            raise ModelError(f"{folder}: tokens {i} and {last[text]} are both {text!r}")


def _check_bytes(vocabulary: Vocabulary, folder: Path) -> None:
    """Refuse a SentencePiece BPE that lacks a byte."""
    if (missing := missing_byte({token.encode() for token in vocabulary.tokens})) is not None:
        raise ModelError(
            f"{folder}: the tokenizer has no token <0x{missing:02X}>; without one for each byte "
            "llama.cpp cannot split texts with characters that the vocabulary lacks"
        )
