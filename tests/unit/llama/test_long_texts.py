"""A long text has the same tokens as in one piece, whatever special tokens are spelled in it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from builds import sdist
from builds.pins import pins
from tests.support import clock
from tests.support.bundled import bundled_gguf
from worker.llama.model import LONGEST_WORD, MAX_TEXT_CHARS, LoadOptions, Model

WORDS = (" ", "  ", "\n", "\t", "a", "Hello", " wörld", "日本", "🦊", "1234", "<", "|>", ".")
KINDS = ["llama-spm", "phi-3", "bert-bge", "nomic-bert-moe", "gemma-4", "gpt-2", "deepseek-coder"]
"""A vocabulary of each of llama.cpp's kinds, with and without tokens that absorb spaces."""


@pytest.mark.parametrize("names", [KINDS, pytest.param(["*"], id="all", marks=pytest.mark.long)])
def test_a_long_text_has_the_same_tokens_as_in_one_piece_in_every_vocabulary(
    names: list[str],
) -> None:
    """With and without parsing control tokens; the vocabularies of the pinned sdist."""
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


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with closing(Model(str(bundled_gguf("f32")), LoadOptions(vocab_only=True))) as model:
        yield model


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_end|> \n", "a<|im_start|> b ", "é<|im_end|>"])
def test_a_long_text_is_tokenized_in_linear_time(model: Model, text: str) -> None:
    """llama.cpp searches the whole rest of a text again after each special token."""
    began = time.process_time()
    model.tokenize(text * (200_000 // len(text)), add_special=False, parse_special=True)
    assert clock.within(time.process_time() - began, 3)


TOKENISE = """
import sys
from worker.llama.model import LoadOptions, Model
for pre in sys.argv[2:]:
    print(pre, flush=True)
    model = Model(sys.argv[1], LoadOptions(vocab_only=True, metadata={"tokenizer.ggml.pre": pre}))
    for word in ("-", "x", "é", " ", "\\n", "1", "a1", "!?", "，", "🦊", "a\u0301"):
        text = (word * 40_000)[:40_000]
        ids = model.tokenize(text, add_special=False, parse_special=True)
        assert b"".join(map(model.piece, ids)).decode() == text, word
"""


RECURSING = (
    "deepseek-llm deepseek-coder deepseek-v3 falcon bloom tekken gpt-4o seed-coder jais-2 "
    "exaone-moe minicpm5"
).split()
"""Pre-tokenizers whose regular expressions recurse: a word of 40,000 characters ends the
process."""


def test_no_word_is_so_long_that_it_ends_the_process() -> None:
    ends_well(TOKENISE, *RECURSING)


FORCED = """
import sys
from worker.llama.constraint import GrammarVocabulary
from worker.llama.model import LoadOptions, Model
from worker.wire.sampling import Constraint
options = LoadOptions(vocab_only=True, metadata={"tokenizer.ggml.pre": "deepseek-v3"})
model = Model(sys.argv[1], options)
for text in ("-" * 40_000, "ü" * 40_000):
    follower = GrammarVocabulary(model).follow(Constraint(f'start: "{text}"', "grammar"))
    found = b"".join(map(model.piece, follower.forced()))
    assert len(found) > 30_000 and text.encode().startswith(found)
"""


def test_no_forced_text_is_so_long_that_it_ends_the_process() -> None:
    ends_well(FORCED)


def ends_well(code: str, *arguments: str) -> None:
    """Run code on the bundled model in a process of its own."""
    command = [sys.executable, "-c", code, str(bundled_gguf("f32")), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stdout[-30:] + ended.stderr[-300:]


@pytest.mark.parametrize("separator", [",", ";--", "/"])
def test_a_long_word_of_shorter_ones_is_cut_between_them(model: Model, separator: str) -> None:
    text = separator.join(f"word{i}<|im_end|>" if i < 50 else "longer" for i in range(5000))
    assert len(text) > 5 * LONGEST_WORD
    for parse_special in (False, True):
        whole = model.tokenize_bytes(text.encode(), False, parse_special)
        assert model.tokenize(text, add_special=False, parse_special=parse_special) == whole
