"""The expressions that a file brings along, and the words that they cut."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

from worker.errors import ModelError
from worker.llama.source_words import SPLIT, SourceWords, recorded_split


def encode(word: str) -> list[int]:
    return [ord(c) for c in word]


def test_words_are_cut_by_each_expression_in_turn() -> None:
    words = SourceWords(json.dumps([r"\p{N}", r"[\p{L}\p{M}]+"]), encode, {"नमस्ते".encode(): 7})
    assert words.ids("नमस्ते1") == [7, ord("1")]
    assert words.ids("ab12") == words.ids("ab12") == [*map(ord, "ab12")]


@pytest.mark.parametrize("split", ["", "{", '["("]', "[1]"])
def test_what_is_no_list_of_expressions_is_refused(split: str) -> None:
    with pytest.raises(ModelError, match=SPLIT):
        SourceWords(split, encode, {})


def test_a_file_is_asked_before_it_is_loaded(tmp_path: Path) -> None:
    for name, texts in {"with": {SPLIT: '["é"]'}, "without": {"general.name": SPLIT}}.items():
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for key, text in texts.items():
            writer.add_string(key, text)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    (tmp_path / "empty").touch()
    assert recorded_split(str(tmp_path / "with")) == '["é"]'
    assert recorded_split(str(tmp_path / "without")) is None
    assert recorded_split(str(tmp_path / "empty")) is None
    assert recorded_split(str(tmp_path / "absent")) is None
