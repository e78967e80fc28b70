"""Qwen3-Reranker: what llama.cpp ranks a prompt with is what the chat model says to "yes"."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.unit.convert import engine, files
from tests.unit.convert.files import edit
from tests.unit.convert.test_parity import DATA, checkpoint
from worker.commands import convert as cli

YES, NO = 286, 287


def reranker(folder: Path, name: str) -> Path:
    """The small Qwen3, with two tokens of its vocabulary called "yes" and "no"."""
    source = checkpoint("qwen3", folder).rename(folder / name)
    with files.rewritten(source / "tokenizer.json") as tokenizer:
        model = tokenizer["model"]
        texts = {i: text for text, i in model["vocab"].items()} | {YES: "yes", NO: "no"}
        vocab = model["vocab"] = {text: i for i, text in texts.items()}
        model["merges"] = [m for m in model["merges"] if {*m, "".join(m)} <= vocab.keys()]
    return source


def converted(source: Path) -> Path:
    return files.converted(source, source.with_suffix(".gguf"), "--outtype", "f32")


@pytest.mark.parametrize("by", ["name", "config", "head"])
def test_the_rank_is_the_probability_of_yes(tmp_path: Path, by: str) -> None:
    source = reranker(tmp_path, "tuned" if by == "config" else "Qwen3-Reranker-0.6B")
    if by == "config":
        edit(source / "config.json", _name_or_path="Qwen/Qwen3-Reranker-0.6B")
    if by == "head":  # It is another one than the embedding, whatever the configuration says.
        edit(source / "config.json", tie_word_embeddings=True)
    target = converted(source)
    expected = np.load(DATA / "qwen3/expected.npz")
    pair = np.exp(expected["logits"][-1][[YES, NO]].astype(np.float64))
    ranks = engine.ranks(target, expected["tokens"].tolist(), 2)
    assert ranks == pytest.approx(pair / pair.sum(), abs=1e-5)
    fields = gguf.GGUFReader(target).fields
    assert fields["qwen3.pooling_type"].contents() == 4
    assert fields["qwen3.classifier.output_labels"].contents() == ["yes", "no"]
    prompt = fields["tokenizer.chat_template.rerank"].contents()
    assert "{query}" in prompt and "{document}" in prompt


def test_another_qwen3_stays_a_chat_model(tmp_path: Path) -> None:
    source = reranker(tmp_path, "Qwen3-Chat")
    (source / "README.md").write_text("# Better than Qwen3-Reranker\nA chat model.\n")
    assert "qwen3.pooling_type" not in gguf.GGUFReader(converted(source)).fields


def test_labels_that_are_no_tokens_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("qwen3", tmp_path).rename(tmp_path / "Qwen3-Reranker-0.6B")
    assert cli.run([str(source), str(tmp_path / "x.gguf"), "--progress", "none"]) != 0
    assert "yes or no" in capsys.readouterr().err
