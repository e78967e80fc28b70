"""Qwen3-Reranker: llama.cpp's rank of a prompt is the chat model's probability of "yes"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from tests.unit.convert import engine, files
from tests.unit.convert.files import edit
from tests.unit.convert.test_parity import DATA, checkpoint
from worker.commands import convert as cli
from worker.engine.text.prompt import PromptBuilder
from worker.llama.model import LoadOptions, Model

YES, NO = 286, 287


def reranker(folder: Path, name: str) -> Path:
    """The small Qwen3, with two tokens of its vocabulary renamed "yes" and "no"."""
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
    if by == "head":  # It differs from the embedding, whatever the configuration says.
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


BEGIN, END = 1, 2
ROBERTA: dict[str, Any] = {
    "type": "RobertaProcessing",
    "cls": ["<|im_start|>", BEGIN],
    "sep": ["<|im_end|>", END],
    "trim_offsets": True,
    "add_prefix_space": False,
}


def template(between: str) -> dict[str, Any]:
    """Return a post-processor that puts these tokens between the texts of a pair."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair=f"<|im_start|> $A {between} $B:1 <|im_end|>",
        special_tokens=[("<|im_start|>", BEGIN), ("<|im_end|>", END)],
    )
    found: dict[str, Any] = json.loads(tokenizer.to_str())["post_processor"]
    return found


@pytest.mark.parametrize(
    "post_processor",
    [ROBERTA, template("<|im_end|> <|im_end|>"), template("<|im_end|>")],
    ids=["roberta", "two tokens", "one token"],
)
def test_a_pair_has_the_tokens_that_its_tokenizer_gives_it(
    tmp_path: Path, post_processor: dict[str, Any]
) -> None:
    source = checkpoint("xlm-roberta-ranker", tmp_path)
    edit(source / "tokenizer.json", post_processor=post_processor)
    edit(source / "tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=True)
    model = Model(str(converted(source)), LoadOptions(vocab_only=True))
    pair = PromptBuilder(model, None, 100).pair("a red fox", "It is red.", "documents[0]")
    own = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    assert pair == own.encode("a red fox", "It is red.").ids
    model.close()


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
