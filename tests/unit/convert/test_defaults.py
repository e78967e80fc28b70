"""A key that is missing in `config.json` has the default of the model's own class.

The defaults are those of transformers (`defaults.json`); a conversion without the key is compared
with one that has the default in its place.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

import pytest

from tests.unit.convert import files
from tests.unit.convert.published import CONFIGS
from tests.unit.convert.test_parity import DATA, GENERATING, MODELS, checkpoint
from worker.convert import architectures, family, prepare
from worker.convert.config import Config
from worker.convert.family import metadata
from worker.convert.family.defaults import UNSETTLED, completed
from worker.convert.family.rules import Metadata
from worker.convert.prepare import Options
from worker.errors import ModelError

DEFAULTS: dict[str, dict[str, Any]] = json.loads(
    (DATA.parent / "definitions/defaults.json").read_text()
)
CLASSES = json.loads((files_of(family) / "classes.json").read_text())
SET_BY_TENSORS = {"id2label", "tie_word_embeddings"}
"""Keys that the tensors determine: a ranker has a row for each label, and a model without a head
uses its embedding."""
WHOLE = {"rope_parameters"}
"""Keys whose absence may be an error that names the whole scaling."""
TOKEN = "_token_id"
"""Suffix of keys that the tokenizer's files define; for RoBERTa's positions see below."""

Made = tuple[Any, ...] | None


def made(folder: Path, config: dict[str, Any]) -> Made:
    """Return metadata, tensors and notes of a conversion; nothing if it is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        conversion = prepare.prepare(folder, Options(outtype="f32"))
    except ModelError:
        return None
    conversion.close()
    shapes = {t.name: t.shape for t in conversion.tensors}
    computed = {
        t.name: piece.make([]).tobytes()
        for t in conversion.tensors
        for piece in t.pieces
        if piece.make is not None and not piece.sources
    }
    return conversion.metadata, shapes, computed, conversion.notes


def described(config: dict[str, Any]) -> Metadata | str:
    """Return the description of a configuration, without checking tensors, or the message with
    which it is refused."""
    family = architectures.family_of(Config(config))
    assert family is not None
    try:
        text = prepare.text_config(family, Config(config))
        d = family.dims(text)
        metadata.check(family, text, d)
        return metadata.of_family(family, text, d)
    except ModelError as error:
        return error.message


def with_section(config: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    return {**config, "text_config": section} if "text_config" in config else section


def test_every_checkpoint_has_its_defaults() -> None:
    assert sorted(DEFAULTS) == MODELS, "tools/reference/make_config_defaults.py writes them"


@pytest.mark.parametrize("name", MODELS)
def test_an_absent_key_is_its_default(name: str, tmp_path: Path) -> None:
    folder = checkpoint(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    section = config.get("text_config", config)
    differing = {}
    for key in (k for k in DEFAULTS[name].keys() - SET_BY_TENSORS if not k.endswith(TOKEN)):
        absent = with_section(config, {k: v for k, v in section.items() if k != key})
        there = with_section(config, {**section, key: DEFAULTS[name][key]})
        found = described(absent)
        if found != described(there) and not (key in WHOLE and isinstance(found, str)):
            differing[key] = found
        if made(folder, absent) not in (None, made(folder, there)):
            differing[key] = "other tensors"
    assert not differing


def test_all_keys_with_default_values_may_be_missing() -> None:
    """As in the parts of multimodal models that transformers 4 saved."""
    parity = {name: json.loads((DATA / name / "config.json").read_text()) for name in MODELS}
    n_left_out = 0
    for name, config in {**parity, **CONFIGS}.items():
        section = config.get("text_config", config)
        kind = section["model_type"].removesuffix("_text")
        usual = CLASSES.get(kind, {"defaults": {}})["defaults"].items()
        kept = {k: v for k, v in section.items() if (k, v) not in usual or k == UNSETTLED.get(kind)}
        n_left_out += len(section) - len(kept)
        if architectures.family_of(Config(config)) is not None:
            assert described(with_section(config, kept)) == described(config), name
    assert n_left_out > 800


@pytest.mark.parametrize("name", MODELS)
def test_a_key_is_read_by_each_name_of_its_class(name: str) -> None:
    config = json.loads((DATA / name / "config.json").read_text())
    section = config.get("text_config", config)
    for other, key in CLASSES[section["model_type"].removesuffix("_text")]["names"].items():
        values = {k: v for k, v in section.items() if k not in (key, other)}
        value = section.get(key, section.get(other))
        one, two = (described(with_section(config, {**values, k: value})) for k in (key, other))
        assert one == two
        assert completed(Config(values)) == completed(Config({**values, other: None}))
        assert described(with_section(config, {**values, key: value, other: value})) == one
        if value is not None:  # transformers uses either one, depending on the class.
            with pytest.raises(ModelError, match="names of one setting"):
                completed(Config({**values, key: value, other: [value]}))


def test_the_last_layer_of_a_gemma_4_has_no_window() -> None:
    """Its class forces that, whatever the file says."""
    config = json.loads((DATA / "gemma-4-moe/config.json").read_text())
    section = config.get("text_config", config)
    assert section["layer_types"] == ["sliding_attention", "full_attention"]
    other = {**section, "layer_types": ["sliding_attention", "sliding_attention"]}
    assert described(with_section(config, other)) == described(config)


def test_a_head_is_tied_if_the_class_ties_it(tmp_path: Path) -> None:
    """Even if the file has a separate one; `tie_embedding` is LFM 2's name for it."""
    tying = [name for name in MODELS if DEFAULTS[name].get("tie_word_embeddings") is True]
    heads = {}
    for name in sorted(set(tying) & set(GENERATING)):
        folder = checkpoint(name, tmp_path)
        config = json.loads((folder / "config.json").read_text())
        if "text_config" in config:
            continue  # The class of the whole model decides whether it is tied.
        section = {k: v for k, v in config.items() if k != "tie_word_embeddings"}
        (path,) = folder.glob("*.safetensors")
        header, data = files.read(path)
        embedding = next(v for k, v in header.items() if re.search(r"embed_tokens\.w|wte", k))
        begin, end = embedding["data_offsets"]
        entry = {**embedding, "data_offsets": [len(data), len(data) + end - begin]}
        files.write(path, {**header, "lm_head.weight": entry}, data + data[begin:end])
        heads[name] = made(folder, section)
        if name.startswith("lfm"):
            untied = made(folder, {**section, "tie_embedding": False})
            assert untied is not None and "output.weight" in untied[1]
    assert [
        name for name, made in heads.items() if made is None or "output.weight" in made[1]
    ] == []


def test_positions_are_counted_from_the_default_of_the_padding(tmp_path: Path) -> None:
    folder = checkpoint("xlm-roberta", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    absent = made(folder, {k: v for k, v in config.items() if k != "pad_token_id"})
    there = made(folder, {**config, "pad_token_id": DEFAULTS["xlm-roberta"]["pad_token_id"]})
    assert absent is not None and there is not None
    assert absent[1]["position_embd.weight"] == there[1]["position_embd.weight"]
    n_rows, n_embd = config["max_position_embeddings"], config["hidden_size"]
    none = made(folder, {**config, "pad_token_id": -1})
    assert none is not None and none[1]["position_embd.weight"] == (n_rows, n_embd)


def test_a_key_whose_default_differs_between_releases_is_required(tmp_path: Path) -> None:
    folder = checkpoint("qwen3-vl", tmp_path)
    with files.rewritten(folder / "config.json") as config:
        del config["text_config"]["rope_parameters"]
    with pytest.raises(ModelError, match="text_config lacks rope_theta"):
        prepare.prepare(folder, Options())


def test_layers_that_pick_tokens_are_read_in_each_form(tmp_path: Path) -> None:
    """For GLM 5: by a list of kinds, by letters, or by an interval and an offset."""
    folder = checkpoint("glm-dsa", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["indexer_types"]
    forms: list[dict[str, Any]] = [{"index_topk_pattern": "FS"}]
    forms += [{"indexer_types": ["full", "shared"]}]
    forms += [{"index_topk_freq": 2, "index_skip_topk_offset": 1}]
    for form in forms:
        both = made(folder, {**config, **form})
        assert both is not None and both[0]["{arch}.attention.indexer.types"] == [True, False]


@pytest.mark.parametrize(
    ("name", "key", "target"),
    [
        ("llama-biases", "attention_bias", "attn_q.bias"),
        ("llama-biases", "mlp_bias", "ffn_gate.bias"),
        ("stablelm", "use_qkv_bias", "attn_q.bias"),
        ("glm-4", "attention_bias", "attn_q.bias"),
        ("glm-4-moe", "use_qk_norm", "attn_q_norm"),
        ("seed-oss", "attention_bias", "attn_q.bias"),
    ],
)
def test_a_tensor_that_the_settings_exclude_is_refused(
    name: str, key: str, target: str, tmp_path: Path
) -> None:
    """transformers ignores such a tensor, and llama.cpp would use it."""
    folder = checkpoint(name, tmp_path)
    files.edit(folder / "config.json", **{key: False})
    with pytest.raises(ModelError, match=f"has a source of {target}, which a model with this"):
        prepare.prepare(folder, Options())


def test_biases_that_a_llama_does_not_declare_are_refused(tmp_path: Path) -> None:
    folder = checkpoint("llama-biases", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert made(folder, {k: v for k, v in config.items() if k != "attention_bias"}) is None


def test_an_interval_defines_the_layers_with_attention(tmp_path: Path) -> None:
    """Layers that should have attention, but lack its tensors, are reported."""
    folder = checkpoint("qwen3-next", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    assert made(folder, {**config, "full_attention_interval": 4}) is not None
    assert made(folder, {**config, "full_attention_interval": 2}) is None


Scaled = dict[str, Any]
LONG: Scaled = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
TRAINED = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("beside", "among", "context", "attention"),
    [
        ({}, {}, 4096, 1.0),  # As in Phi-3's class.
        ({TRAINED: 16}, {}, 16, 1.5**0.5),
        ({TRAINED: 16}, {TRAINED: 64}, 16, 1.5**0.5),
        ({TRAINED: 16}, {"attention_factor": 1.25}, 16, 1.25),
        ({TRAINED: 16}, {"factor": 8.0}, None, None),
    ],
)
def test_the_context_of_a_long_rotation_is_found_on_either_level(
    tmp_path: Path, beside: Scaled, among: Scaled, context: int | None, attention: float | None
) -> None:
    folder = checkpoint("phi-4-mini", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in (TRAINED, "rope_parameters")}
    found = made(folder, {**config, **beside, "rope_theta": 1e4, "rope_scaling": {**LONG, **among}})
    metadata = found[0] if found else {}
    assert metadata.get("{arch}.rope.scaling.original_context_length") == context
    assert metadata.get("{arch}.rope.scaling.attn_factor") == pytest.approx(attention)


YARN: Scaled = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
LLAMA3: Scaled = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("name", "rope"), [("qwen3", YARN), ("llama-3.1", LLAMA3)])
def test_a_scaling_has_the_trained_context_of_transformers(
    name: str, rope: Scaled, tmp_path: Path
) -> None:
    """Beside the rotation, among its parameters, or else the whole context."""
    folder = checkpoint(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 64}
    beside, among, whole, other = (
        made(folder, {**config, **more, "rope_parameters": {**rope, **own}})
        for more, own in (
            ({TRAINED: 64}, {TRAINED: 32}),
            ({}, {TRAINED: 64}),
            ({}, {}),
            ({}, {TRAINED: 32}),
        )
    )
    assert beside == among == whole != other


def test_a_scaling_beside_other_parameters_is_refused(tmp_path: Path) -> None:
    """A model card may add one to what transformers 5 saved: one of the two would be ignored."""
    folder = checkpoint("qwen3", tmp_path)
    files.edit(folder / "config.json", rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(ModelError, match="rope_scaling and rope_parameters contradict"):
        prepare.prepare(folder, Options())
