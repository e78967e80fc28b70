"""A long text has the tokens of its whole, whatever special tokens are spelled in it."""

from __future__ import annotations

import random
import time

import pytest

from builds import sdist
from builds.pins import pins
from tests.support.bundled import bundled_gguf
from worker.llama.model import MAX_TEXT_CHARS, LoadOptions, Model

WORDS = (" ", "  ", "\n", "\t", "a", "Hello", " wörld", "日本", "🦊", "1234", "<", "|>", ".")
KINDS = ["llama-spm", "phi-3", "bert-bge", "nomic-bert-moe", "gemma-4", "gpt-2", "deepseek-coder"]
"""A vocabulary of each of llama.cpp's kinds, with and without tokens that take spaces along."""


@pytest.mark.parametrize("names", [KINDS, pytest.param(["*"], id="all", marks=pytest.mark.long)])
def test_a_long_text_has_the_tokens_of_its_whole_in_every_vocabulary(names: list[str]) -> None:
    """Whether control tokens are parsed in it or not: those of the pinned sdist."""
    folder = sdist.unpacked(pins()) / "vendor/llama.cpp/models"
    paths = [path for name in names for path in sorted(folder.glob(f"ggml-vocab-{name}.gguf"))]
    assert len(paths) >= (19 if names == ["*"] else len(KINDS))
    for path in paths:
        model = Model(str(path), LoadOptions(vocab_only=True))
        rng = random.Random(path.name)
        spelled = [model.token_text(token) for token in model.control | model.user_defined]
        tokens = rng.sample(spelled, min(len(spelled), 8))
        text = "".join(rng.choices([*WORDS, *tokens], k=MAX_TEXT_CHARS))
        for parse_special in (False, True):
            whole = model.tokenize_bytes(text.encode(), True, parse_special)
            found = model.tokenize(text, add_special=True, parse_special=parse_special)
            assert found == whole, (path.name, parse_special)
        model.close()


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_end|> \n", "a<|im_start|> b ", "é<|im_end|>"])
def test_a_long_text_costs_no_more_than_its_length(text: str) -> None:
    """llama.cpp searches the whole rest of a text again behind each special token."""
    model = Model(str(bundled_gguf("f32")), LoadOptions(vocab_only=True))
    began = time.process_time()
    model.tokenize(text * (200_000 // len(text)), add_special=False, parse_special=True)
    assert time.process_time() - began < 3
    model.close()
