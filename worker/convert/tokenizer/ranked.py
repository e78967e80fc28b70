"""Byte-level BPE vocabularies of checkpoints that list byte strings by rank.

Kimi's repositories have a `tiktoken.model`, a list of byte strings and ranks. Only Python code in
the repository says how a text is split; that code is not run, and only Kimi's expression is known.
Mistral's have a `tekken.json`, whose ranks follow a fixed number of special tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf.vocab import bytes_to_unicode

from worker.convert.checkpoint import Checkpoint
from worker.convert.tokenizer import pre_tokenizers
from worker.errors import ModelError

TIKTOKEN, TEKKEN = "tiktoken.model", "tekken.json"
TEKKEN_SPLIT, _KIMI_SPLIT = "tekken", "kimi-k2"
"""llama.cpp's names of their pre-tokenizers."""
_OLD_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
"""The special tokens of versions that do not list theirs."""

_ADDED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


def ranked_definition(checkpoint: Checkpoint) -> dict[str, Any]:
    """The definition in one of these files, in the form of a `tokenizer.json`; empty without one.

    Raises:
        ModelError: a line is not a byte string and a rank, a rank is out of range, or a
            `tekken.json` has too few tokens or another expression than all published ones.
    """
    path = checkpoint.folder / TIKTOKEN
    if path.is_file():
        decoder = checkpoint.json("tokenizer_config.json").get("added_tokens_decoder") or {}
        added = [{**entry, "id": int(i)} for i, entry in decoder.items()]
        return _of_ranks(_read_ranks(path), _KIMI_SPLIT, added)
    tekken = checkpoint.json(TEKKEN)
    return _tekken(tekken, checkpoint.folder / TEKKEN) if tekken else {}


def _tekken(tekken: Mapping[str, Any], path: Path) -> dict[str, Any]:
    n_special = tekken["config"]["default_num_special_tokens"]
    n_ranks = tekken["config"]["default_vocab_size"] - n_special
    if [tekken["config"]["pattern"]] != _expressions(TEKKEN_SPLIT):
        raise ModelError(f"{path}: config.pattern is not the one that Mistral publishes")
    ranks = {
        base64.b64decode(entry["token_bytes"], validate=True): entry["rank"]
        for entry in tekken["vocab"]
        if entry["rank"] < n_ranks
    }
    if len(ranks) != n_ranks:
        raise ModelError(f"{path} has {len(ranks)} tokens instead of {n_ranks}")
    special = [f"<SPECIAL_{i}>" for i in range(n_special)]
    if (listed := tekken.get("special_tokens")) is None:
        listed = [{"rank": i, "token_str": text} for i, text in enumerate(_OLD_SPECIAL)]
    for entry in listed:
        if not 0 <= (rank := entry["rank"]) < n_special:
            raise ModelError(
                f"{path}: the special token {entry['token_str']!r} has the rank {rank}, "
                f"but there are {n_special}"
            )
        special[rank] = entry["token_str"]
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(special)]
    return _of_ranks(ranks, TEKKEN_SPLIT, added, first_id=n_special)


def _of_ranks(
    ranks: Mapping[bytes, int], pre: str, added: Sequence[Mapping[str, Any]], first_id: int = 0
) -> dict[str, Any]:
    """In the form of a `tokenizer.json`, with ids that follow the ranks from `first_id` on.

    Raises:
        ModelError: a rank is below 0.
    """
    for token, rank in ranks.items():
        if rank < 0:
            raise ModelError(f"the token {token!r} has the rank {rank}, which is below 0")
    return {
        "version": "1.0",
        "added_tokens": [{**_ADDED, **token} for token in added],
        "pre_tokenizer": _splitting_by(_expressions(pre)),
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {_letters(token): first_id + rank for token, rank in ranks.items()},
            "merges": [f"{_letters(left)} {_letters(right)}" for left, right in merges(ranks)],
        },
    }


def tekken_override(checkpoint: Checkpoint, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The pre-tokenizer of a `tekken.json`, if the byte-level `tokenizer.json` beside it has
    another, as transformers before 4.57.3 wrote it; else empty."""
    steps = list(pre_tokenizers.steps_of(tokenizer.get("pre_tokenizer")))
    tekken = checkpoint.json(TEKKEN)
    if not tekken or not any(s["type"] == "ByteLevel" for s in steps):
        return {}
    cuts = _splitting_by([tekken["config"]["pattern"]])
    return {} if pre_tokenizers.same(steps, pre_tokenizers.steps_of(cuts)) else cuts


def _splitting_by(expressions: Sequence[str]) -> dict[str, Any]:
    """A `tokenizer.json`'s pre-tokenizer that splits by these and maps bytes to characters."""
    cuts = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    letters = dict.fromkeys(("add_prefix_space", "use_regex"), False) | {"trim_offsets": True}
    return {"type": "Sequence", "pretokenizers": [*cuts, {"type": "ByteLevel", **letters}]}


def _expressions(pre: str) -> list[str]:
    return pre_tokenizers.split_of(pre_tokenizers.named(pre))


def _read_ranks(path: Path) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ModelError(
                f"{path}: line {number} is not a byte string in base64 and a rank", path=str(path)
            ) from None
    return found


def _letters(token: bytes) -> str:
    """GPT-2's character for each byte."""
    letters = bytes_to_unicode()
    return "".join(letters[byte] for byte in token)


def merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each token, in the order of ranks.

    A token's two parts are those that remain when its bytes are merged by all lower ranks.
    """
    found = []
    for token in sorted((t for t in ranks if len(t) > 1), key=lambda t: ranks[t]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:], strict=False)]
            lowest = min(pairs)
            if lowest >= ranks[token]:
                break
            at = pairs.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found
