"""What a source's tokenizer does to a text before llama.cpp's, around special tokens."""

from __future__ import annotations

import pytest

from worker.llama.source_text import SourceText

SPECIAL, ADDED = {"<s>": 1, "<|end|>": 2}, {"<tool>": 3}


@pytest.mark.parametrize(
    ("steps", "text", "parts"),
    [
        (["nfc"], "e\u0301", ["\u00e9"]),
        # A mark behind a special token belongs to no character of it.
        (["nfc"], "<|end|>\u0338a", [2, "\u0338a"]),
        (["nfc"], "a<|end|><|end|>b", ["a", 2, 2, "b"]),
        (["space-first"], "a<s>b", [" a", 1, "b"]),
        (["space-first"], "<s>b", [1, "b"]),
        (["space-first"], " a", [" a"]),
        (["space-each"], "a<s>b<s> c", [" a", 1, " b", 1, " c"]),
        (["space-each"], "", []),
    ],
)
def test_steps(steps: list[str], text: str, parts: list[int | str]) -> None:
    source = SourceText(steps, [], [], SPECIAL, ADDED)
    assert source.split(text, parse_special=True) == parts


def test_tokens_take_white_space_along() -> None:
    source = SourceText([], [2], [1], SPECIAL, ADDED)
    assert source.split("a \n<|end|> b<s>  c", parse_special=True) == ["a", 2, " b", 1, "c"]


def test_control_tokens_are_text_where_they_are_not_parsed() -> None:
    source = SourceText(["nfc"], [], [], SPECIAL, ADDED)
    assert source.split("<s>e\u0301<tool>", parse_special=False) == ["<s>\u00e9", 3]
