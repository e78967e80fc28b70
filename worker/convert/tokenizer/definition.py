"""Vocabularies of byte-level BPE and WordPiece, from `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gguf.constants import TokenType

from worker.convert.tokenizer import pre_tokenizers
from worker.convert.tokenizer.pre_tokenizers import steps_of
from worker.convert.tokenizer.ranked import TEKKEN_SPLIT
from worker.convert.tokenizer.vocabulary import SPACE, Vocabulary, merges_of
from worker.errors import ModelError
from worker.llama.source_tokenizer import WHOLE_WORDS

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_ROLES = {"<s>": "bos", "</s>": "eos", "<unk>": "unk", "<pad>": "pad"}


def byte_level(tokenizer: Mapping[str, Any], pre: str | None) -> Vocabulary:
    """A byte-level BPE vocabulary; `pre` replaces the recognised pre-tokenizer."""
    model = tokenizer["model"]
    known = pre_tokenizers.named(pre) if pre else pre_tokenizers.recognise(tokenizer)
    vocabulary = Vocabulary(
        model="gpt2",
        pre=known.name,
        merges=[" ".join(pair) for pair in merges_of(tokenizer)],
    )
    if vocabulary.pre == TEKKEN_SPLIT:  # A tekken.json assigns no roles.
        added = tokenizer.get("added_tokens") or ()
        roles = ((_ROLES.get(token["content"]), token["id"]) for token in added)
        vocabulary.special_ids = {role: i for role, i in roles if role}
    for text, i in sorted(model["vocab"].items(), key=lambda item: item[1]):
        vocabulary.put(i, text, TokenType.NORMAL)
    whole = bool(model.get("ignore_merges"))
    vocabulary.split = pre_tokenizers.split_of(known, ignore_merges=whole)
    if vocabulary.split and whole:
        vocabulary.steps.append(WHOLE_WORDS)
    elif whole and known.steps and not known.ignore_merges:
        check_merged(tokenizer)
    if known.steps and known not in pre_tokenizers.KNOWN:
        vocabulary.notes.append(
            "llama.cpp has no pre-tokenizer of this definition: the worker splits texts by it, "
            f"other programs as {known.name} does"
        )
    return vocabulary


def check_merged(tokenizer: Mapping[str, Any]) -> None:
    """Refuse a BPE that takes words whole (`ignore_merges`) if its merges do not make one of them.
    The texts of `check` may not contain that word.

    Raises:
        ModelError: names such a word.
    """
    from tokenizers.models import BPE

    model = tokenizer["model"]
    try:
        merged = BPE(model["vocab"], [(left, right) for left, right in merges_of(tokenizer)])
    except Exception as error:
        raise ModelError(f"tokenizer.json is refused by the tokenizers library: {error}") from None
    others = {token["content"] for token in tokenizer.get("added_tokens") or ()}
    others |= {model.get("unk_token"), ""}
    for text in model["vocab"].keys() - others:
        made = [token.value for token in merged.tokenize(text)]
        if made != [text] and not _BYTE_TOKEN.fullmatch(text):
            raise ModelError(
                f"tokenizer.json: ignore_merges takes words such as {text!r} whole, which no "
                "merges make; llama.cpp does not do so for this kind of tokenizer"
            )


def wordpiece(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """A WordPiece vocabulary, as BERT has them.

    llama.cpp marks the pieces that begin a word; `tokenizer.json` marks those that continue one.
    """
    model = tokenizer["model"]
    prefix = model.get("continuing_subword_prefix") or "##"
    vocabulary = Vocabulary(model="bert")
    for text, i in sorted(model["vocab"].items(), key=lambda item: item[1]):
        inside = text.startswith(prefix)
        form = text.removeprefix(prefix) if inside else SPACE + text
        vocabulary.put(i, form, TokenType.NORMAL)
    if (unk := model["vocab"].get(model.get("unk_token"))) is not None:
        vocabulary.special_ids["unk"] = unk
    longest = model.get("max_input_chars_per_word", 100)
    vocabulary.notes.append(
        f"a word of more than {longest} characters becomes one {model.get('unk_token')} in the "
        "tokenizer, but pieces in llama.cpp"
    )
    for step in steps_of(tokenizer.get("normalizer"), "BertNormalizer"):
        if not (step.get("clean_text", True) and step.get("handle_chinese_chars", True)):
            raise ModelError("tokenizer.json: llama.cpp always cleans texts as BERT does")
        lowercase = bool(step.get("lowercase", True))
        accents = step.get("strip_accents")
        vocabulary.settings["tokenizer.ggml.normalizer.lowercase"] = lowercase
        vocabulary.settings["tokenizer.ggml.normalizer.strip_accents"] = (
            lowercase if accents is None else bool(accents)
        )
    return vocabulary
