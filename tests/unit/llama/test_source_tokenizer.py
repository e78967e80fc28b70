"""The steps of a model's own tokenizer before llama.cpp's, around special tokens."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import clock
from worker.errors import ModelError
from worker.llama.source_tokenizer import SPLIT, SourceTokenizer, SourceWords, any_of, recorded

SPECIAL, ADDED = {"<s>": 1, "<|end|>": 2}, {"<tool>": 3}


def parts(
    text: str,
    steps: list[str],
    lstrip: tuple[int, ...] = (),
    rstrip: tuple[int, ...] = (),
    *,
    parse_special: bool = True,
) -> list[int | str]:
    """Return the special tokens of a text, and the texts between them as llama.cpp gets them."""
    between: list[str] = []

    def encode(prepared: str) -> list[int]:
        between.append(prepared)
        return [-len(between)]

    source = SourceTokenizer(steps, lstrip, rstrip, SPECIAL, ADDED, encode)
    ids = source.ids(text, parse_special=parse_special)
    return [between[-each - 1] if each < 0 else each for each in ids]


@pytest.mark.parametrize(
    ("steps", "text", "expected"),
    [
        (["nfc"], "e\u0301", ["\u00e9"]),
        # A combining mark after a special token does not belong to its characters.
        (["nfc"], "<|end|>\u0338a", [2, "\u0338a"]),
        (["nfc"], "a<|end|><|end|>b", ["a", 2, 2, "b"]),
        (["space-first"], "a<s>b", [" a", 1, "b"]),
        (["space-first"], "<s>b", [1, "b"]),
        (["space-first"], " a", [" a"]),
        (["space-each"], "a<s>b<s> c", [" a", 1, " b", 1, " c"]),
        (["space-each"], "", []),
    ],
)
def test_steps_prepare_the_text_between_special_tokens(
    steps: list[str], text: str, expected: list[int | str]
) -> None:
    assert parts(text, steps) == expected


def test_tokens_absorb_white_space() -> None:
    found = parts("a \n<|end|> b<s>  c", [], lstrip=(2,), rstrip=(1,))
    assert found == ["a", 2, " b", 1, "c"]


def test_control_tokens_are_text_if_they_are_not_parsed() -> None:
    assert parts("<s>e\u0301<tool>", ["nfc"], parse_special=False) == ["<s>\u00e9", 3]


def encode(word: str) -> list[int]:
    return [ord(c) for c in word]


def test_words_are_cut_by_each_expression_in_turn() -> None:
    words = SourceWords(json.dumps([r"\p{N}", r"[\p{L}\p{M}]+"]), encode, {"नमस्ते".encode(): 7})
    assert words.ids("नमस्ते1") == [7, ord("1")]
    assert words.ids("ab12") == words.ids("ab12") == [*map(ord, "ab12")]


def test_tokens_of_words_are_cached_unless_they_are_long() -> None:
    """Otherwise a client's words of megabytes would stay in memory."""
    looked_up: list[str] = []

    def counted(word: str) -> list[int]:
        looked_up.append(word)
        return [len(word)]

    words = SourceWords(json.dumps([r"\s+"]), counted, {})
    for _ in range(2):
        assert words.ids("short " + "long" * 9) == [5, 1, 36]
    assert looked_up == ["short", " ", "long" * 9, "long" * 9]


@pytest.mark.parametrize("split", ["", "{", '["("]', "[1]"])
def test_anything_but_a_list_of_expressions_is_refused(split: str) -> None:
    with pytest.raises(ModelError, match=SPLIT):
        SourceWords(split, encode, {})


def test_metadata_of_a_file_is_read_before_it_is_loaded(tmp_path: Path) -> None:
    for name, texts in {"with": {SPLIT: '["é"]'}, "without": {"general.name": SPLIT}}.items():
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for key, text in texts.items():
            writer.add_string(key, text)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    (tmp_path / "empty").touch()
    assert recorded(str(tmp_path / "with"), SPLIT) == '["é"]'
    assert recorded(str(tmp_path / "without"), SPLIT) is None
    assert recorded(str(tmp_path / "empty"), SPLIT) is None
    assert recorded(str(tmp_path / "absent"), SPLIT) is None


@given(st.lists(st.text("ab.(<", max_size=9), max_size=30), st.text("ab.(<", max_size=60))
def test_the_longest_text_is_found_at_each_place(texts: list[str], text: str) -> None:
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    plain = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    assert any_of(texts).findall(text) == plain.findall(text)


def test_a_common_prefix_of_many_tokens_costs_little() -> None:
    pattern = any_of(f"<unused{number}>" for number in range(6242))
    began = time.thread_time()
    assert not pattern.search("<" * 200_000)
    assert clock.within(time.thread_time() - began, 2)


def test_runs_of_any_length_are_compiled() -> None:
    pattern = any_of(" " * n for n in range(1, 2000))
    assert [len(run) for run in pattern.findall(f"{' ' * 1500}a{' ' * 7}")] == [1500, 7]
