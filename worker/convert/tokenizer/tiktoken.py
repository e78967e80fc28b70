"""Byte-level BPE vocabularies from a `tiktoken.model`, as in Kimi's repositories.

The file is a list of byte strings and ranks. Only Python code in the repository says how a text is
split; that code is not run, and only Kimi's expression is known.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gguf.constants import TokenType

from worker.convert.tokenizer import pre_tokenizers
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.errors import ModelError
from worker.llama.source_tokenizer import WHOLE_WORDS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tiktoken.model"
PRE_TOKENIZER = "kimi-k2"

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PLAIN)]
_LETTERS = {byte: chr(byte) for byte in _PLAIN} | {
    byte: chr(256 + i) for i, byte in enumerate(_OTHERS)
}
"""GPT-2's character for each byte."""


def read(path: Path) -> Vocabulary:
    """
    Raises:
        ModelError: a line is not a byte string and a rank.
    """
    return of_ranks(read_ranks(path), PRE_TOKENIZER)


def of_ranks(ranks: Mapping[bytes, int], pre: str, first_id: int = 0) -> Vocabulary:
    """With ids that follow the ranks, the lowest being `first_id`."""
    vocabulary = Vocabulary(
        model="gpt2",
        pre=pre,
        merges=[f"{letters(left)} {letters(right)}" for left, right in merges(ranks)],
        split=pre_tokenizers.split_of(pre),
        steps=[WHOLE_WORDS],
    )
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        vocabulary.put(first_id + rank, letters(token), TokenType.NORMAL)
    return vocabulary


def read_ranks(path: Path) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelError(
                f"{path}: line {number} is not a byte string in base64 and a rank", path=str(path)
            ) from None
    return found


def letters(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)


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


def reference(
    ranks: Mapping[bytes, int], pre: str, added: Mapping[str, int], first_id: int = 0
) -> Tokenizer:
    """A tokenizer of the `tokenizers` library for the same ranks and added tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, models
    from tokenizers import pre_tokenizers as steps

    vocab = {letters(token): first_id + rank for token, rank in ranks.items()}
    pairs = [(letters(left), letters(right)) for left, right in merges(ranks)]
    vocab |= added
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=True))
    cuts = [
        steps.Split(Regex(expression), "isolated") for expression in pre_tokenizers.split_of(pre)
    ]
    tokenizer.pre_tokenizer = steps.Sequence([*cuts, steps.ByteLevel(False, use_regex=False)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer
