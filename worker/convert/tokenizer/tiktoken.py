"""Byte-level BPE vocabularies from a `tiktoken.model`, as in Kimi's repositories.

The file is a list of byte strings and ranks. Only Python code in the repository says how a text is
split; that code is not run, and only Kimi's expression is known.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf.vocab import bytes_to_unicode

from worker.convert.tokenizer import pre_tokenizers
from worker.errors import ModelError
from worker.models.checkpoint_files import read_json

FILE = "tiktoken.model"
_PRE_TOKENIZER = "kimi-k2"

_ADDED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


def read(folder: Path) -> dict[str, Any]:
    """The folder's vocabulary in the form of a `tokenizer.json`.

    Raises:
        ModelError: a line is not a byte string and a rank.
    """
    settings = folder / "tokenizer_config.json"
    decoder = read_json(settings).get("added_tokens_decoder") if settings.is_file() else {}
    added = [{**entry, "id": int(i)} for i, entry in (decoder or {}).items()]
    return of_ranks(_read_ranks(folder / FILE), _PRE_TOKENIZER, added)


def of_ranks(
    ranks: Mapping[bytes, int], pre: str, added: Sequence[Mapping[str, Any]], first_id: int = 0
) -> dict[str, Any]:
    """In the form of a `tokenizer.json`, with ids that follow the ranks from `first_id` on."""
    cuts = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in pre_tokenizers.split_of(pre)
    ]
    letters = dict.fromkeys(("add_prefix_space", "use_regex"), False) | {"trim_offsets": True}
    steps = [*cuts, {"type": "ByteLevel", **letters}]
    return {
        "version": "1.0",
        "added_tokens": [{**_ADDED, **token} for token in added],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {_letters(token): first_id + rank for token, rank in ranks.items()},
            "merges": [f"{_letters(left)} {_letters(right)}" for left, right in merges(ranks)],
        },
    }


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
