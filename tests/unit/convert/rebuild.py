"""Rebuilds a checkpoint's tokenizer files from vocabulary-only GGUF files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from worker.convert.tokenizer import pre_tokenizers
from worker.models.gguf.layout import read_layout

NORMAL, USER_DEFINED, CONTROL, UNUSED = 1, 4, 3, 5
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def isolated(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def splits(*steps: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Return pre-tokenizer steps, each an expression or another step; the last maps bytes to
    letters."""
    found = [isolated(step) if isinstance(step, str) else step for step in steps]
    return [*found, byte_level(use_regex=False)]


DIGITS = {"type": "Digits", "individual_digits": True}
_LETTERS = pre_tokenizers.named("deepseek-llm").steps[1].removeprefix("split ")
PRE_TOKENIZERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": ([byte_level(use_regex=True)], False),
    "starcoder": ([DIGITS, byte_level(use_regex=True)], False),
    "llama-bpe": (
        splits(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"),
        True,
    ),
    "qwen2": (
        splits(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"),
        False,
    ),
    "qwen35": (
        splits(
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        False,
    ),
    "deepseek-llm": (
        splits(
            *("[\r\n]", _LETTERS, "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$"),
            *("[一-龥ࠀ-一가-퟿]+", DIGITS),
        ),
        False,
    ),
    "falcon": (
        [
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(use_regex=True),
            {"type": "Digits", "individual_digits": False},
            isolated("[0-9][0-9][0-9]"),
        ],
        False,
    ),
    "deepseek-coder": (
        splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS),
        False,
    ),
}
"""The definitions in the models' own `tokenizer.json`: steps, and whether merges are ignored for
whole words."""


class Source:
    """The arrays of a vocabulary-only GGUF."""

    def __init__(self, path: Path) -> None:
        # The library's own reader takes a hundred times as long.
        layout = read_layout(path)

        def array(key: str) -> Any:
            found = layout.arrays.get(f"tokenizer.ggml.{key}")
            return None if found is None else list(found.read())

        self.tokens: list[str] = array("tokens")
        self.types: list[int] = array("token_type")
        self.scores: list[float] | None = array("scores")
        self.merges: list[str] | None = array("merges")
        self.unk = int(layout.metadata.get("tokenizer.ggml.unknown_token_id", 0))
        self.adds_space = layout.metadata.get("tokenizer.ggml.add_space_prefix") is not False

    def base(self) -> dict[str, int]:
        """The vocabulary of the merges. The `tokenizers` library numbers added tokens from its
        length on, so it must not contain tokens after its last one."""
        length = len(self.types) - self.types[::-1].index(NORMAL)
        kinds = zip(self.tokens[:length], self.types, strict=False)
        return {
            text: i for i, (text, kind) in enumerate(kinds) if kind not in (USER_DEFINED, UNUSED)
        }

    def added(self) -> list[dict[str, Any]]:
        return [
            {"id": i, "content": text, "special": kind == CONTROL, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        ]


def write_byte_level(source: Source, name: str, folder: Path) -> None:
    steps, ignore_merges = PRE_TOKENIZERS[name]
    assert source.merges is not None
    write_json(
        folder,
        {
            "added_tokens": source.added(),
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": byte_level(use_regex=True),
            "model": {
                "type": "BPE",
                "ignore_merges": ignore_merges,
                "vocab": source.base(),
                "merges": source.merges,
            },
        },
    )


def write_sentencepiece_json(source: Source, folder: Path) -> None:
    """Write a SentencePiece BPE as a `tokenizer.json`: ranked merges instead of scores."""
    assert source.scores is not None
    ids = {text: i for i, text in enumerate(source.tokens)}
    merges = []
    for i, (text, kind) in enumerate(zip(source.tokens, source.types, strict=True)):
        for cut in range(1, len(text)) if kind == 1 and not source.merges else ():
            pair = text[:cut], text[cut:]
            if pair[0] in ids and pair[1] in ids:
                merges.append((-source.scores[i], ids[pair[0]], ids[pair[1]], pair))
    merges.sort(key=lambda m: m[:3])
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "\u2581"}] * source.adds_space
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"})
    write_json(
        folder,
        {
            "added_tokens": source.added(),
            "normalizer": {"type": "Sequence", "normalizers": steps},
            "pre_tokenizer": None,
            "model": {
                "type": "BPE",
                "unk_token": source.tokens[source.unk],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": ids,
                "merges": source.merges or [list(pair) for *_, pair in merges],
            },
        },
    )


def write_json(folder: Path, tokenizer: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **tokenizer}))


def write_model(source: Source, folder: Path, n_pieces: int | None = None) -> None:
    """Write a `tokenizer.model`, byte by byte, optionally only its first pieces."""
    assert source.scores is not None
    message = bytearray()
    pieces = list(zip(source.tokens, source.scores, source.types, strict=True))
    for text, score, kind in pieces[:n_pieces]:
        piece = _field(1, text.encode()) + b"\x15" + struct.pack("<f", score)
        message += _field(1, piece + _number(3, kind))
    message += _field(
        2, _number(3, 2) + _number(35, 1) + _number(40, 0) + _number(41, 1) + _number(42, 2)
    )
    message += _field(3, _number(3, 1) + _number(4, 0))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(bytes(message))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def vectors(models: Path, name: str) -> list[tuple[str, list[int]]]:
    """Return the texts and ids that ship with a vocabulary."""
    file = models / f"ggml-vocab-{name}.gguf.inp"
    texts = file.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = file.with_suffix(".out").read_text().splitlines()
    assert len(texts) >= len(lines) > 20
    return [
        (text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=False)
    ]
