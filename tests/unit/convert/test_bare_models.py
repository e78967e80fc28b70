"""Classes without the usual head, under which many embedding models are published.

Their tensors' names lack the root prefix, and the files of sentence-transformers are beside them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.unit.convert import files
from tests.unit.convert.test_parity import DATA, checkpoint
from worker.convert.prepare import Options, prepare, prepare_checked
from worker.errors import ModelError

ROOT = r"^(model|bert|roberta)\."


def bare(folder: Path, name: str) -> None:
    """Replace a class by this one, without a head."""
    files.edit(folder / "config.json", architectures=[name])
    files.leave_out(folder, "lm_head.weight")
    (path,) = folder.glob("*.safetensors")
    header, data = files.read(path)
    files.write(path, {re.sub(ROOT, "", key): entry for key, entry in header.items()}, data)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "LlamaModel"),
        ("mistral", "MistralModel"),  # As in e5-mistral.
        ("qwen2", "Qwen2Model"),
        ("gemma-2", "Gemma2Model"),  # As in bge-multilingual-gemma2.
        ("xlm-roberta", "XLMRobertaForMaskedLM"),
        ("xlm-roberta", "RobertaForMaskedLM"),  # As in all-roberta-large.
    ],
)
def test_a_bare_model_is_converted_like_the_usual_class(
    tmp_path: Path, model: str, name: str
) -> None:
    folder = checkpoint(model, tmp_path)
    shutil.copy(DATA / "qwen3-embedding/modules.json", folder)
    shutil.copytree(DATA / "qwen3-embedding/1_Pooling", folder / "1_Pooling", dirs_exist_ok=True)
    usual = prepare_checked(folder, Options(outtype="f32"))
    bare(folder, name)
    made = prepare_checked(folder, Options(outtype="f32"))
    assert made.architecture == usual.architecture
    assert made.metadata == usual.metadata
    others = {t.name: t.shape for t in usual.tensors if t.name != "output.weight"}
    assert {t.name: t.shape for t in made.tensors} == others
    made.close()
    usual.close()


def test_without_a_pooling_a_missing_head_is_reported(tmp_path: Path) -> None:
    folder = checkpoint("mistral", tmp_path)
    bare(folder, "MistralModel")
    with pytest.raises(ModelError, match="there is no lm_head"):
        prepare_checked(folder, Options())


def test_a_bare_encoder_ends_texts_like_its_tokenizer(tmp_path: Path) -> None:
    """Also without the files of sentence-transformers: one token between two texts, not two."""
    folder = checkpoint("modern-bert", tmp_path)
    texts = {"<|endoftext|>": 0, "<|im_start|>": 1}
    begin, end = ({"SpecialToken": {"id": text, "type_id": 0}} for text in texts)
    special = {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in texts.items()}
    a, b = ({"Sequence": {"id": text, "type_id": 0}} for text in "AB")
    with files.rewritten(folder / "tokenizer.json") as tokenizer:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, a, end],
            "pair": [begin, a, end, b, end],
            "special_tokens": special,
        }
    (folder / "modules.json").unlink()
    made = prepare(folder, Options())
    keys = ("add_sep_token", "bos_token_id", "eos_token_id", "add_eos_token")
    assert [made.metadata[f"tokenizer.ggml.{key}"] for key in keys] == [False, 0, 1, True]
    made.close()
