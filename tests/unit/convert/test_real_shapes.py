"""Forms of published checkpoints that are easily refused or converted wrongly."""

from __future__ import annotations

import errno
import json
import os
import re
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import TokenType

from tests.unit.convert import files
from tests.unit.convert.files import edit
from tests.unit.convert.test_failures import fails
from tests.unit.convert.test_parity import MODELS, checkpoint
from worker.api.http.state import sampling_defaults
from worker.convert import family as package
from worker.convert.prepare import Conversion, Options, prepare
from worker.errors import ModelError
from worker.models.gguf.header import read_header


def add_token(folder: Path, text: str, **settings: Any) -> int:
    """Add a token to `tokenizer.json`."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    with files.rewritten(folder / "tokenizer.json") as tokenizer:
        added, vocab = tokenizer["added_tokens"], tokenizer["model"]["vocab"]
        i = 1 + max(*vocab.values(), *(token["id"] for token in added))
        added.append({"id": i, "content": text, "special": True, **flags, **settings})
    return int(i)


def add_tensor(folder: Path, name: str, dtype: str, size_bytes: int) -> None:
    header, data = files.read(folder / "model.safetensors")
    ends = [len(data), len(data) + size_bytes]
    header[name] = {"dtype": dtype, "shape": [size_bytes], "data_offsets": ends}
    files.write(folder / "model.safetensors", header, data + bytes(size_bytes))


def prepared(folder: Path) -> Conversion:
    conversion = prepare(folder, Options())
    conversion.checkpoint.close()
    return conversion


def converts(folder: Path) -> None:
    files.converted(folder, folder.parent / "model.gguf", "--outtype", "f16")


def test_an_added_token_without_a_row_is_left_out_and_named(tmp_path: Path) -> None:
    """As in Gemma 3 270M and 1B, and in Llama 2 with an added `<pad>`."""
    source = checkpoint("llama", tmp_path)
    assert add_token(source, "<image_soft_token>") == 288
    conversion = prepared(source)
    assert len(conversion.metadata["tokenizer.ggml.tokens"]) == 288  # type: ignore[arg-type]
    assert "'<image_soft_token>'" in conversion.notes[0]
    converts(source)


@pytest.mark.parametrize("do_sample", [True, False, None])
def test_sampling_defaults_are_those_of_the_generation_config(
    tmp_path: Path, do_sample: bool | None
) -> None:
    """Qwen, Llama and Gemma are published with one. transformers uses its numbers only when
    sampling."""
    source = checkpoint("llama", tmp_path)
    settings = {"do_sample": do_sample, "temperature": 0.5, "top_k": 20, "top_p": 1, "min_p": None}
    text = json.dumps({**settings, "repetition_penalty": 1.1})
    (source / "generation_config.json").write_text(text)
    wanted = {"temperature": 0.5, "top_k": 20, "top_p": 1.0} if do_sample is not False else {}
    usual = sampling_defaults({}, {})
    target = tmp_path / "model.gguf"
    files.converted(source, target, "--outtype", "f16")
    found = sampling_defaults(read_header(target).metadata, {})
    assert {name: found[name] for name in found if found[name] != usual[name]} == wanted


@pytest.mark.parametrize("role", ["pad", "mask", "sep", "unk"])
def test_a_special_text_that_is_no_token_is_left_out(tmp_path: Path, role: str) -> None:
    source = checkpoint("llama", tmp_path)
    edit(source / "tokenizer_config.json", **{f"{role}_token": "[NOWHERE]"})
    assert any("[NOWHERE]" in note for note in prepared(source).notes)


def test_tensors_that_are_left_out_are_named_with_the_reason(tmp_path: Path) -> None:
    source = checkpoint("bert", tmp_path)
    add_tensor(source, "bert.embeddings.position_ids", "U8", 8)
    for name in ("cls.predictions.bias", "cls.seq.weight", "cls.seq.bias"):
        add_tensor(source, name, "U8", 8)
    notes = [note for note in prepared(source).notes if note.startswith("left out")]
    assert "left out bert.embeddings.position_ids: llama.cpp computes them" in notes
    assert [note for note in notes if note.endswith("more: they are for another task")]
    source = checkpoint("exaone-moe", tmp_path)
    add_tensor(source, "mtp.layers.0.enorm.weight", "U8", 8)
    reason = "they predict further tokens"
    assert f"left out mtp.layers.0.enorm.weight: {reason}" in prepared(source).notes


@pytest.mark.parametrize(
    ("family", "tensor", "dtype"),
    [
        ("gpt-2", "transformer.h.0.attn.bias", "U8"),
        ("gpt-2", "transformer.h.0.attn.bias", "BOOL"),
        ("qwen2", "model.layers.0.self_attn.rotary_emb.inv_freq", "U8"),
        ("qwen2", "model.rotary_emb.inv_freq", "U8"),
        ("qwen3", "mtp.layers.0.input_layernorm.weight", "U8"),
    ],
)
def test_buffers_and_what_predicts_further_tokens_are_left_out_of_any_type(
    tmp_path: Path, family: str, tensor: str, dtype: str
) -> None:
    source = checkpoint(family, tmp_path)
    add_tensor(source, tensor, dtype, 32 * 32)
    assert any(note.startswith(f"left out {tensor}: ") for note in prepared(source).notes)
    converts(source)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "hidden_act"),
        ("llama", "rope_scaling"),
        ("llama", "tie_word_embeddings"),
        ("llama", "head_dim"),
        ("qwen2", "use_sliding_window"),
        ("qwen2-moe", "decoder_sparse_step"),
        ("smollm-3", "no_rope_layers"),
        ("gemma-2", "layer_types"),
        ("gpt-2", "scale_attn_weights"),
    ],
)
def test_null_is_accepted_like_an_absent_key(tmp_path: Path, family: str, key: str) -> None:
    source = checkpoint(family, tmp_path)
    edit(source / "config.json", **{key: None})
    prepared(source)


@pytest.mark.long
@pytest.mark.parametrize("family", MODELS)
def test_null_is_accepted_wherever_a_key_may_be_absent(tmp_path: Path, family: str) -> None:
    source = checkpoint(family, tmp_path)
    path = source / "config.json"
    config = json.loads(path.read_text())

    def is_taken(values: dict[str, Any]) -> bool:
        path.write_text(json.dumps(values))
        try:
            prepared(source)
        except ModelError:
            return False
        return True

    classes = json.loads((files_of(package) / "classes.json").read_text())
    known = classes.get(config.get("text_config", config)["model_type"].removesuffix("_text"), {})
    for key in config.keys() - known.get("nullable", ()):
        without = {name: value for name, value in config.items() if name != key}
        assert is_taken(without) == is_taken({**config, key: None}), key


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("settings", "is_idle"),
    [
        ({"layer_types": None}, False),
        ({"layer_types": None, "max_window_layers": 2}, True),
        ({"layer_types": None, "max_window_layers": None}, True),  # 28, by their classes
        ({"layer_types": None, "sliding_window": None}, True),
        ({"layer_types": None, "sliding_window": 256}, True),
        ({"layer_types": ["full_attention", "full_attention"]}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
    ],
)
def test_a_window_is_refused_unless_no_layer_has_it(
    family: str, settings: dict[str, Any], is_idle: bool, tmp_path: Path
) -> None:
    source = checkpoint(family, tmp_path)
    edit(source / "config.json", **{**WINDOW, **settings})
    if is_idle:
        prepared(source)
    else:
        with pytest.raises(ModelError, match="use_sliding_window is True"):
            prepared(source)


GRANITE_MOE = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}
ERNIE = {"mlp.moe_statics": "mlp.gate.moe_statics"}


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("granite-moe", GRANITE_MOE),
        ("granite-hybrid", GRANITE_MOE),
        ("ernie-4.5-moe", ERNIE),
        ("nemotron-h", {"backbone.": "model."}),
        ("mixtral", {"block_sparse_moe": "mlp"}),
        *((name, {}) for name in ("qwen3-moe", "deepseek-v3", "lfm-2-moe", "solar-open")),
    ],
)
def test_experts_are_read_as_transformers_5_has_them_in_memory(
    family: str, names: dict[str, str], tmp_path: Path
) -> None:
    """It saves partly offloaded models this way: in one tensor for each layer."""
    source = checkpoint(family, tmp_path)
    before = [(tensor.name, tensor.shape) for tensor in prepared(source).tensors]
    path = source / "model.safetensors"
    kept: list[files.Tensor] = []
    stacks: dict[str, dict[str, list[files.Tensor]]] = {}
    for tensor in sorted(files.read_tensors(path), key=lambda each: natural(each[0])):
        name = tensor[0]
        for old, new in names.items():
            name = name.replace(old, new)
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", name)
        if match:
            role = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(match[2], match[2])
            stacks.setdefault(match[1], {}).setdefault(role, []).append(tensor)
        else:
            kept.append((name, *tensor[1:]))
    for experts, by_role in stacks.items():
        gated = [role for role in ("gate_proj", "up_proj") if role in by_role]
        inner = "gate_up_proj" if len(gated) > 1 else "up_proj"
        for name, roles in ((inner, gated), ("down_proj", ["down_proj"])):
            members = list(zip(*(by_role[role] for role in roles), strict=True))
            _, kind, (n_rows, n_columns), _ = members[0][0]
            data = b"".join(part[3] for member in members for part in member)
            shape = [len(members), n_rows * len(roles), n_columns]
            kept.append((f"{experts}.{name}", kind, shape, data))
    files.write_tensors(path, kept)
    assert [(tensor.name, tensor.shape) for tensor in prepared(source).tensors] == before


def test_experts_of_gemma_4_are_read_one_by_one(tmp_path: Path) -> None:
    """As quantisers save them, which know single matrices only."""
    source, path = checkpoint("gemma-4-moe", tmp_path), tmp_path / "gemma-4-moe/model.safetensors"
    target = files.converted(source, tmp_path / "m.gguf", "--outtype", "bf16")
    wanted = target.read_bytes()
    apart: list[files.Tensor] = []
    for name, kind, shape, data in files.read_tensors(path):
        stem, _, role = name.partition(".experts.")
        for i, member in enumerate(
            np.split(np.frombuffer(data, np.uint16), shape[0] if role else 1)
        ):
            roles = {"": [name], "down_proj": ["down_proj"]}.get(role, ["gate_proj", "up_proj"])
            own = [shape[1] // len(roles), shape[2]] if role else shape
            for each, values in zip(roles, np.split(member, len(roles)), strict=True):
                full = f"{stem}.experts.{i}.{each}.weight" if role else name
                apart.append((full, kind, own, values.tobytes()))
    files.write_tensors(path, apart)
    files.converted(source, target, "--outtype", "bf16", "--overwrite")
    assert files.verified(source, target) == 0
    n = sum(entry.n_bytes for entry in read_header(target).tensors)
    assert target.read_bytes()[-n:] == wanted[-n:], "the digest of the source differs"


def natural(name: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", name)]


@pytest.mark.parametrize("says", ["the whole", "its text part"])
def test_a_multimodal_model_ties_its_head_on_either_level(says: str, tmp_path: Path) -> None:
    """Before transformers 5 it was in the text part; later releases write both."""
    source = checkpoint("qwen2-vl", tmp_path)
    files.leave_out(source, "lm_head.weight")
    with files.rewritten(source / "config.json") as config:
        config["tie_word_embeddings"] = says == "the whole"
        config["text_config"]["tie_word_embeddings"] = says == "its text part"
    assert "output.weight" not in [tensor.name for tensor in prepared(source).tensors]


def test_a_multimodal_name_over_a_text_models_configuration(tmp_path: Path) -> None:
    """As in published pruned Qwen3.5 models, without a width that no layer uses."""
    source = checkpoint("qwen3.5-moe", tmp_path)
    with files.rewritten(source / "config.json") as config:
        config.pop("intermediate_size", None)
        config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    assert prepared(source).architecture == "qwen35moe"


def test_role_markers_are_control_tokens_despite_their_definition(tmp_path: Path) -> None:
    source = checkpoint("llama", tmp_path)
    with files.rewritten(source / "tokenizer.json") as tokenizer:
        del tokenizer["added_tokens"][2:]
        for entry, text in zip(tokenizer["added_tokens"], ("<｜User｜>", "<think>"), strict=True):
            entry |= {"content": text, "special": False}
    edit(source / "tokenizer_config.json", bos_token=None, eos_token=None)
    types = prepared(source).metadata["tokenizer.ggml.token_type"]
    assert types[:2] == [TokenType.CONTROL, TokenType.USER_DEFINED]  # type: ignore[index]


def test_an_error_of_the_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on a background thread, and on macOS, which has no fdatasync."""

    def failing(_file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.delattr(os, "fdatasync", raising=False)
    monkeypatch.setattr(os, "fsync", failing)
    assert "Input/output error" in fails(checkpoint("llama", tmp_path), capsys)


@pytest.mark.parametrize(
    ("name", "as_published"),
    [
        ("lfm-2", {"layer_types": None, "full_attn_idxs": [1]}),
        ("lfm-2", {"architectures": ["LFM2ForCausalLM"]}),
        ("ernie-4.5", {"architectures": ["Ernie4_5_ForCausalLM"]}),
        ("nemotron-h-dense", {"head_dim": None, "attention_head_dim": 16}),
        ("hunyuan-moe", {"moe_topk": [2, 2], "num_experts": [4, 4]}),
    ],
)
def test_a_setting_of_an_older_form_means_the_same(
    name: str, as_published: dict[str, Any], tmp_path: Path
) -> None:
    """As in published configurations; transformers now saves another form."""
    source = checkpoint(name, tmp_path)
    expected = prepared(source)
    edit(source / "config.json", **as_published)
    found = prepared(source)
    assert found.metadata == expected.metadata
    assert [t.name for t in found.tensors] == [t.name for t in expected.tensors]


def test_nemotron_names_the_length_of_its_heads_differently(tmp_path: Path) -> None:
    source = checkpoint("nemotron-h-dense", tmp_path)
    edit(source / "config.json", head_dim=None, attention_head_dim=32)
    assert prepared(source).metadata["{arch}.attention.key_length"] == 32


def test_a_list_of_different_sizes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("hunyuan-moe", tmp_path)
    edit(source / "config.json", moe_topk=[2, 1])
    assert "moe_topk must be a positive integer, not [2, 1]" in fails(source, capsys)


@pytest.mark.parametrize("family", ["bert-ranker", "xlm-roberta-ranker"])
@pytest.mark.parametrize("n_rows", [1, 2])
def test_a_classifier_has_as_many_labels_as_rows(family: str, n_rows: int, tmp_path: Path) -> None:
    """Two is the default, which transformers omits from a configuration."""
    source = checkpoint(family, tmp_path)
    with files.rewritten(source / "config.json") as config:
        del config["id2label"], config["label2id"]
    name = "classifier" if family == "bert-ranker" else "classifier.out_proj"
    path = source / "model.safetensors"
    grown = [
        (tensor, kind, [n_rows, *shape[1:]], n_rows * data)
        if tensor in (f"{name}.weight", f"{name}.bias")
        else (tensor, kind, shape, data)
        for tensor, kind, shape, data in files.read_tensors(path)
    ]
    files.write_tensors(path, grown)
    if n_rows == 1:
        prepared(source)
    else:
        with pytest.raises(ModelError, match="a classifier of 2 labels cannot be converted"):
            prepared(source)


def test_a_bert_ranker_notes_that_llama_cpp_has_one_type_of_text(tmp_path: Path) -> None:
    source = checkpoint("bert-ranker", tmp_path)
    note = "llama.cpp gives all tokens the first text's type; the model has another for the second"
    assert note in prepared(source).notes
    edit(source / "config.json", type_vocab_size=1)
    assert note not in prepared(source).notes


def test_a_bidirectional_model_without_a_pooling_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("gte-qwen2", tmp_path)
    assert prepared(source).metadata["{arch}.attention.causal"] is False
    (source / "modules.json").unlink()
    assert "(is_causal is false), but no modules.json" in fails(source, capsys)
