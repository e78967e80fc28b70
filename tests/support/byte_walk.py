"""Answers that a constraint allows, drawn at random over a vocabulary of single bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from worker.llama.constraint import compile_grammar

EOS = 256
CLOSING = frozenset(b'"}]')
BLANKS = frozenset(b" \t\n\r")


class _Bytes:
    """The vocabulary that llguidance needs: token i is the byte i, and one more ends the text."""

    eos_token_id = EOS
    bos_token_id = None
    tokens: Sequence[bytes] = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids: Sequence[int] = [EOS]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def byte_tokenizer() -> Any:
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=EOS + 1, eos_token=EOS)


def answer(grammar: str, seed: int, max_bytes: int = 400, field: str = "s") -> str | None:
    """Return a text that follows `grammar`; `None` if the walk did not end.

    Raises:
        InvalidRequest: like the engine, at the same point.
    """
    matcher = compile_grammar(byte_tokenizer(), grammar, field)
    draw = random.Random(seed)
    out = bytearray()
    while len(out) < max_bytes:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: EOS + 1]).tolist()
        assert allowed, "there is always a way to go on or to end"
        if EOS in allowed and (len(allowed) == 1 or draw.random() < 0.5):
            return out.decode()
        # Prefer closing characters and avoid blanks, or few walks would end.
        weights = [40 if t in CLOSING else 0.02 if t in BLANKS else 1 for t in allowed]
        weights = [0 if t == EOS else w for t, w in zip(allowed, weights, strict=True)]
        token = draw.choices(allowed, weights)[0]
        assert matcher.consume_token(token)
        out.append(token)
    return None


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole `text` follows the grammar."""
    matcher = compile_grammar(byte_tokenizer(), grammar, "s")
    return all(matcher.try_consume_tokens([b]) for b in text.encode()) and matcher.is_accepting()
