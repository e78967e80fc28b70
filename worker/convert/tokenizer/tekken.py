"""Mistral's `tekken.json`, where a repository has no `tokenizer.json`: byte strings by rank, behind
a fixed number of special tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf.constants import TokenType

from worker.convert.tokenizer import pre_tokenizers, tiktoken
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.errors import ModelError
from worker.models.checkpoint_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tekken.json"
_PRE_TOKENIZER = "tekken"
_OLD_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
"""The special tokens of versions that do not list theirs."""


def read(path: Path) -> Vocabulary:
    """
    Raises:
        ModelError: the file is malformed, or cuts texts otherwise than all published ones.
    """
    ranks, special = _read(path)
    vocabulary = tiktoken.of_ranks(ranks, _PRE_TOKENIZER, first_id=len(special))
    for i, text in enumerate(special):
        vocabulary.put(i, text, TokenType.CONTROL)
    vocabulary.special_ids = {
        role: special.index(text)
        for role, text in (("bos", "<s>"), ("eos", "</s>"), ("unk", "<unk>"), ("pad", "<pad>"))
        if text in special
    }
    return vocabulary


def reference(path: Path) -> Tokenizer:
    """A tokenizer of the `tokenizers` library for the same file."""
    ranks, special = _read(path)
    added = {text: i for i, text in enumerate(special)}
    return tiktoken.reference(ranks, _PRE_TOKENIZER, added, first_id=len(special))


def _read(path: Path) -> tuple[dict[bytes, int], list[str]]:
    """Ranks of the tokens that the model has, and the special tokens by id."""
    tekken = read_json(path)
    try:
        settings: Mapping[str, Any] = tekken["config"]
        n_special = int(settings["default_num_special_tokens"])
        n_ranks = int(settings["default_vocab_size"]) - n_special
        if [settings["pattern"]] != pre_tokenizers.split_of(_PRE_TOKENIZER):
            raise ModelError(f"{path}: config.pattern is not the one that Mistral publishes")
        ranks = {
            base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"])
            for entry in tekken["vocab"]
            if entry["rank"] < n_ranks
        }
        listed = tekken.get("special_tokens")
        special = [f"<SPECIAL_{i}>" for i in range(n_special)]
        named = {i: text for i, text in enumerate(_OLD_SPECIAL)} if listed is None else {}
        named |= {int(entry["rank"]): str(entry["token_str"]) for entry in listed or []}
        for i, text in named.items():
            special[i] = text
        if len(ranks) != n_ranks:
            raise ValueError(f"{len(ranks)} tokens instead of {n_ranks}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{path} is malformed: {type(error).__name__} {error}", path=str(path)
        ) from error
    return ranks, special
