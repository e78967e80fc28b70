"""Mistral's `tekken.json`, where a repository has no `tokenizer.json`: byte strings by rank, behind
a fixed number of special tokens."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from worker.convert.tokenizer import pre_tokenizers, tiktoken
from worker.errors import ModelError
from worker.models.checkpoint_files import read_json

FILE = "tekken.json"
PRE_TOKENIZER = "tekken"
_OLD_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
"""The special tokens of versions that do not list theirs."""


def read(folder: Path) -> dict[str, Any]:
    """The folder's vocabulary in the form of a `tokenizer.json`.

    Raises:
        ModelError: the file cuts texts otherwise than all published ones, or has too few tokens.
    """
    tekken = read_json(folder / FILE)
    n_special = int(tekken["config"]["default_num_special_tokens"])
    n_ranks = int(tekken["config"]["default_vocab_size"]) - n_special
    if [tekken["config"]["pattern"]] != pre_tokenizers.split_of(PRE_TOKENIZER):
        raise ModelError(f"{folder / FILE}: config.pattern is not the one that Mistral publishes")
    ranks = {
        base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"])
        for entry in tekken["vocab"]
        if entry["rank"] < n_ranks
    }
    if len(ranks) != n_ranks:
        raise ModelError(f"{folder / FILE} has {len(ranks)} tokens instead of {n_ranks}")
    special = [f"<SPECIAL_{i}>" for i in range(n_special)]
    if (listed := tekken.get("special_tokens")) is None:
        listed = [{"rank": i, "token_str": text} for i, text in enumerate(_OLD_SPECIAL)]
    for entry in listed:
        special[int(entry["rank"])] = str(entry["token_str"])
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(special)]
    return tiktoken.of_ranks(ranks, PRE_TOKENIZER, added, first_id=n_special)
