"""`prepare` on the published `config.json` of many models, with all their tensors.

Names and shapes are those that transformers saves for the configuration (`tensors.json`), sharded
by the repository's own index if one is known; the weights are holes in sparse files.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.convert import published
from tests.unit.convert.files import edit, write_hollow
from tests.unit.convert.published import CONFIGS, DATA, TENSORS, Shapes, tensors
from tests.unit.convert.test_parity import DATA as PARITY
from worker.convert.prepare import Options, prepare
from worker.errors import ModelError

NOT_TEXT = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|vision_model|visual|pooler|mtp)\..*"
)
LARGE, FEW_LAYERS = ("DeepSeek-V3", "Kimi-K2-Instruct"), 5
"""Models with tens of thousands of tensors; `make long` prepares all their layers."""
FBGEMM = "Llama-3.1-405B-Instruct-FP8"
INDEXES = DATA / "indexes"
RENAMED = re.compile(r"(?<=model\.)language_model\.|(?<=vision_tower\.)vision_model\.")
"""Parts of names that transformers no longer uses."""
ARCHITECTURES = {
    "BertModel": "bert",
    "CohereForCausalLM": "command-r",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GemmaForCausalLM": "gemma",
    "GptOssForCausalLM": "gpt-oss",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "StableLmForCausalLM": "stablelm",
}
"""llama.cpp's names of the architectures."""


LACKING = {"c4ai-command-r-v01": {"rope_theta": 8000000.0}}
"""Keys that the copy of a configuration omits."""


TOKENIZERS = {128256: DATA / "llama3_1", 151936: DATA / "qwen3", 152064: DATA / "qwen3"}
"""Tokenizers by vocabulary size; that of the parity models replaces others."""


ENDS = {202048: {200001: "<|end_of_text|>", 200007: "<|eom|>", 200008: "<|eot|>"}}
"""By vocabulary size, names that the replacement lacks; the last one is the tokenizer's own."""


MLX = "Mistral-Small-4-MLX-4bit"


def name_ends(folder: Path, ends: dict[int, str]) -> None:
    decoder = {str(i): {"content": text} for i, text in ends.items()}
    last = list(ends.values())[-1]
    edit(folder / "tokenizer_config.json", added_tokens_decoder=decoder, eos_token=last)


def split_as_published(folder: Path, index: bytes, found: Shapes) -> None:
    """Write shards by the repository's own index, which has the total size of its tensors."""
    listed = json.loads(index)
    shapes = {name: found[RENAMED.sub("", name)] for name in listed["weight_map"]}
    assert len(shapes) == len(found)
    assert 2 * sum(map(math.prod, shapes.values())) == listed["metadata"]["total_size"]
    published.write_shards(folder, index, shapes)


def first_layers(config: dict[str, Any], found: Shapes) -> tuple[dict[str, Any], Shapes]:
    layer = re.compile(r"model\.layers\.(\d+)\.")
    kept = {
        name: shape
        for name, shape in found.items()
        if not (match := layer.match(name)) or int(match[1]) < FEW_LAYERS
    }
    return config | {"num_hidden_layers": FEW_LAYERS}, kept


CASES = [
    *(pytest.param(model, False, marks=pytest.mark.long) for model in LARGE),
    *((model, True) for model in LARGE),
    *((model, False) for model in TENSORS if model not in LARGE),
]


@pytest.mark.parametrize(("model", "shortened"), CASES)
def test_a_published_model_is_recognised_and_complete(
    tmp_path: Path, model: str, shortened: bool
) -> None:
    config, found = CONFIGS[model] | LACKING.get(model, {}), tensors(model)
    if shortened:
        config, found = first_layers(config, found)
    folder = tmp_path / model
    tokenizer = TOKENIZERS.get(config.get("vocab_size", 0), PARITY / "tokenizer")
    shutil.copytree(tokenizer, folder)
    if ends := ENDS.get(config.get("text_config", {}).get("vocab_size")):
        name_ends(folder, ends)
    if config.get("is_causal") is False:  # Its repository also says how it embeds.
        shutil.copy(PARITY / "gte-qwen2/modules.json", folder)
        shutil.copytree(PARITY / "gte-qwen2/1_Pooling", folder / "1_Pooling")
    published.write(folder, config, found.items())
    index = INDEXES / f"{model}.json.gz"
    if index.is_file():
        (folder / "model.safetensors").unlink()
        split_as_published(folder, gzip.decompress(index.read_bytes()), found)
    conversion = prepare(folder, Options(outtype="bf16"))
    conversion.checkpoint.close()
    assert conversion.architecture == ARCHITECTURES[config["architectures"][0]]
    wanted = sum(math.prod(s) for name, s in found.items() if not NOT_TEXT.fullmatch(name))
    made = [math.prod(t.shape) for t in conversion.tensors if t.pieces[0].sources]
    assert sum(made) == wanted


def test_the_fp8_of_fbgemm_has_a_scale_for_each_row(tmp_path: Path) -> None:
    """As transformers' layer registers them; only few layers are written, with the names of all
    modules."""
    config = dict(CONFIGS[FBGEMM], num_hidden_layers=FEW_LAYERS)
    width, wide, n_kv = config["hidden_size"], config["intermediate_size"], 8 * 128
    kept = config["quantization_config"]["modules_to_not_convert"]
    matrices = {
        **{f"mlp.{name}_proj": (wide, width) for name in ("gate", "up")},
        **{f"self_attn.{name}_proj": (n_kv, width) for name in ("k", "v")},
        **{f"self_attn.{name}_proj": (width, width) for name in ("q", "o")},
        "mlp.down_proj": (width, wide),
    }
    found: Shapes = {"model.norm.weight": (width,)}
    found |= {name: (128256, width) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    others: dict[str, str] = {}
    for layer in (f"model.layers.{i}" for i in range(FEW_LAYERS)):
        for norm in ("input", "post_attention"):
            found[f"{layer}.{norm}_layernorm.weight"] = (width,)
        for name, shape in matrices.items():
            found[f"{layer}.{name}.weight"] = shape
            if f"{layer}.{name}" not in kept:
                found[f"{layer}.{name}.weight_scale"] = (shape[0], 1)
                others[f"{layer}.{name}.weight"] = "F8_E4M3"
                others[f"{layer}.{name}.weight_scale"] = "F32"
    assert 0 < len(others) / 2 < FEW_LAYERS * len(matrices)
    folder = tmp_path / "model"
    shutil.copytree(TOKENIZERS[128256], folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_hollow(folder / "model.safetensors", found.items(), others=others)
    conversion = prepare(folder, Options(outtype="bf16"))
    conversion.checkpoint.close()
    shapes = {t.name: t.shape for t in conversion.tensors}
    assert shapes["blk.1.ffn_down.weight"] == (width, wide)


MLX_SHAPES: Shapes = {
    **dict.fromkeys(("lm_head", "embed_tokens"), (131072, 4096)),
    **dict.fromkeys(("shared_experts.gate_proj", "shared_experts.up_proj"), (2048, 4096)),
    **dict.fromkeys(("switch_mlp.gate_proj", "switch_mlp.up_proj"), (128, 2048, 4096)),
    "shared_experts.down_proj": (4096, 2048),
    "switch_mlp.down_proj": (128, 4096, 2048),
    "self_attn.embed_q": (32, 256, 64),
    "self_attn.unembed_out": (32, 128, 256),
    "self_attn.kv_a_proj_with_mqa": (320, 4096),
    "self_attn.q_a_proj": (1024, 4096),
    "self_attn.q_b_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate": (128, 4096),
    "kv_a_layernorm": (256,),
    "q_a_layernorm": (1024,),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "model.norm"), (4096,)),
}
"""The conversion of MLX's tensors, by the suffix of a module's name."""


def test_a_published_checkpoint_of_mlx_is_recognised_and_complete(tmp_path: Path) -> None:
    config, index = CONFIGS[MLX], gzip.decompress((INDEXES / f"{MLX}.json.gz").read_bytes())
    names = json.loads(index)["weight_map"]
    found: Shapes = dict.fromkeys(names, (1,))
    others: dict[str, str] = {}
    for name in (each for each in names if each.startswith("language_model.")):
        module, _, part = name.rpartition(".")
        *rows, width = next(s for end, s in MLX_SHAPES.items() if module.endswith(end))
        is_stored = f"{module}.scales" in names
        if is_stored and part == "weight":
            others[name] = "U32"
        found[name] = (*rows, width // (8 if part == "weight" else 64) if is_stored else width)
    shutil.copytree(PARITY / "tokenizer", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    published.write_shards(tmp_path, index, found, others)
    conversion = prepare(tmp_path, Options(outtype="bf16"))
    conversion.checkpoint.close()
    shapes = {t.name: t.shape for t in conversion.tensors}
    assert shapes["blk.35.attn_k_b.weight"] == MLX_SHAPES["self_attn.embed_q"]
    assert shapes["blk.35.ffn_down_exps.weight"] == MLX_SHAPES["switch_mlp.down_proj"]
    assert sum(map(math.prod, shapes.values())) > 118e9


REFUSED = {
    "Qwen-72B-Chat": "architecture QWenLMHeadModel is converted by llama.cpp's own",
    "openPangu-7B": "architecture PanguEmbeddedForCausalLM is converted by llama.cpp's",
}


@pytest.mark.parametrize("model", sorted(REFUSED))
def test_other_published_models_are_refused_by_name(tmp_path: Path, model: str) -> None:
    assert {FBGEMM, MLX, *REFUSED} == CONFIGS.keys() - TENSORS.keys()
    published.write(tmp_path, CONFIGS[model], [("model.norm.weight", (16384,))])
    index = INDEXES / f"{model}.json.gz"
    if index.is_file():
        names = json.loads(gzip.decompress(index.read_bytes()))["weight_map"]
        (tmp_path / "model.safetensors").unlink()
        published.write_shards(
            tmp_path, gzip.decompress(index.read_bytes()), dict.fromkeys(names, (1,))
        )
    with pytest.raises(ModelError, match=REFUSED[model]):
        prepare(tmp_path, Options())
