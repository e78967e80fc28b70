"""RWKV's World vocabularies: byte strings, of which the longest that fits is taken each time.

The repository's own file has a line for each token: id, string or byte string as Python writes it,
number of bytes. llama.cpp wants the bytes escaped.
"""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gguf.constants import TokenType

from worker.convert.tokenizer.tiktoken import letters
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "rwkv_vocab_v20230424.txt"
END_OF_TEXT = 0


def read(path: Path) -> Vocabulary:
    """
    Raises:
        ModelError: a line is not an id, a string and its length.
    """
    vocabulary = Vocabulary(model="rwkv", special_ids={"bos": END_OF_TEXT, "eos": END_OF_TEXT})
    vocabulary.put(END_OF_TEXT, escaped(b"\xff<s>"), TokenType.CONTROL)  # No text has these bytes.
    for i, token in sorted(read_tokens(path).items()):
        vocabulary.put(i, escaped(token), TokenType.NORMAL)
        with suppress(UnicodeDecodeError):
            vocabulary.spellings[token.decode()] = i
    return vocabulary


def read_tokens(path: Path) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line:
            continue
        try:
            i, rest = line.split(" ", 1)
            literal, length = rest.rsplit(" ", 1)
            token = ast.literal_eval(literal)
            token = token.encode() if isinstance(token, str) else token
            if not isinstance(token, bytes) or len(token) != int(length) or int(i) <= END_OF_TEXT:
                raise ValueError
            found[int(i)] = token
        except (ValueError, SyntaxError):
            raise ModelError(
                f"{path}: line {number} is not an id, a string and its number of bytes",
                path=str(path),
            ) from None
    return found


def escaped(token: bytes) -> str:
    """The bytes as text, in the escapes that llama.cpp reads."""
    return repr(token)[2:-1]


def reference(path: Path) -> Tokenizer:
    """A tokenizer of the `tokenizers` library that takes the longest token each time, too."""
    from tokenizers import Tokenizer, models
    from tokenizers import pre_tokenizers as steps

    vocab = {letters(token): i for i, token in read_tokens(path).items()}
    model = models.WordPiece(
        vocab, unk_token="", max_input_chars_per_word=1 << 20, continuing_subword_prefix=""
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = steps.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer
