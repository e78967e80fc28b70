"""How other programs read our files: Ollama by the rules of its sources, and llama-server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import httpx
import pytest
from gguf import GGUFValueType as Kind
from tokenizers import normalizers
from tokenizers import pre_tokenizers as pre

from builds.pins import pins
from tests.unit.convert import files
from tests.unit.convert.files import edit
from tests.unit.convert.test_parity import MODELS, checkpoint
from tests.unit.convert.test_tokenizers import byte_level, train_sentencepiece
from tools.bench.peer_build import peers_of
from tools.bench.servers import RunningServer, Shape, llama_server_kind
from worker.convert.output import write_layout
from worker.convert.prepare import Options, prepare
from worker.convert.safetensors import read_header
from worker.convert.tokenizer import reference
from worker.convert.tokenizer.corpus import TEXTS
from worker.llama.model import LoadOptions, Model

NEEDED = {
    "general.architecture": Kind.STRING,
    "general.type": Kind.STRING,
    "general.file_type": Kind.UINT32,
    "tokenizer.ggml.model": Kind.STRING,
    "tokenizer.ggml.add_bos_token": Kind.BOOL,
    "{}.block_count": Kind.UINT32,
    "{}.context_length": Kind.UINT32,
    "{}.embedding_length": Kind.UINT32,
}
"""Ollama treats a value of another type as missing, and a missing one as 0, false or "" (`fs/ggml`,
`keyValue`): this would cause a missing context length or a second BOS."""
TAKEN = {
    "tokenizer.chat_template": Kind.STRING,
    "tokenizer.ggml.pre": Kind.STRING,
    "tokenizer.ggml.bos_token_id": Kind.UINT32,
    "tokenizer.ggml.eos_token_id": Kind.UINT32,
    "{}.attention.key_length": Kind.UINT32,
    "{}.attention.value_length": Kind.UINT32,
    "{}.attention.sliding_window": Kind.UINT32,
    **{f"{{}}.ssm.{x}": Kind.UINT32 for x in ("conv_kernel", "inner_size", "state_size")},
}
"""Keys that must have these types if they exist."""
BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""A number, or an array with one for each layer."""
RENAMED = "gptoss olmo3 glm4moelite qwen25vl deepseekocr glmocr laguna gemma3n nemotron_h_omni"
LEGACY = {
    "gemma3": r"dense\.0\.weight|.*rope\.(global|local)\.freq_base|.*mm\.tokens_per_image"
    r"|.*add_(padding|unknown)_token",
    "lfm2": r"output_norm\.weight",
    "mistral3": r".*rope\.scaling\.(beta_fast|mscale_all_dim)|.*rope\.scaling_beta",
    "nemotron_h_moe": r"blk\.[01]\.ffn_latent_in.*|mtp\..*",
    "qwen35": r".*(vision\.block_count|image_token_id|v_head_reordered|mrope_interleaved)|mtp\..*",
    "qwen3next": r"blk\.\d+\.ssm_dt",
}
LEGACY["qwen35moe"] = LEGACY["qwen35"] + r"|qwen35moe\.feed_forward_length"
"""Keys and tensors by which Ollama recognises files of its own old converter, which it changes
while it loads them (`llama/compat`): ours must not match."""


def faults(path: Path, embeds: bool) -> Iterator[str]:
    """Yield what Ollama would misread."""
    reader = gguf.GGUFReader(path)
    fields, tensors = reader.fields, {tensor.name for tensor in reader.tensors}
    architecture = str(fields["general.architecture"].contents())
    kinds = {key: field.types for key, field in fields.items()}
    for key, kind in {**NEEDED, **TAKEN}.items():
        key, is_needed = key.format(architecture), key in NEEDED
        if (is_needed or key in kinds) and kinds.get(key) != [kind]:
            yield f"{key} is {kinds.get(key)}"
    for key in (f"{architecture}.{name}" for name in BY_LAYER):
        found = kinds.get(key, [Kind.UINT32])
        if found not in ([Kind.UINT32], [Kind.ARRAY, Kind.UINT32], [Kind.ARRAY, Kind.INT32]):
            yield f"{key} is {found}"
    if kinds["tokenizer.ggml.tokens"] != [Kind.ARRAY, Kind.STRING]:
        yield "tokens are no texts"
    if fields["general.type"].contents() != "model":
        yield "it is no model"
    if (f"{architecture}.pooling_type" in fields) != embeds:
        yield "what it is for is told by its pooling alone"
    # A prompt loses its template's BOS if llama.cpp adds one.
    model = Model(str(path), LoadOptions(vocab_only=True))
    forced = "gemma4" in (model.metadata(f"tokenizer.ggml.{k}") for k in ("model", "pre"))
    if model.adds_bos != (forced or fields["tokenizer.ggml.add_bos_token"].contents()):
        yield "a prompt has two BOS, or none"
    model.close()
    names = {*fields, *tensors}
    legacy = re.compile(rf"(v|mm|a)\..*|{LEGACY.get(architecture, '(?!)')}")
    if architecture in RENAMED.split() or any(map(legacy.fullmatch, names)):
        yield "it looks like one of Ollama's own old files"
    if architecture == "gemma4" and fields["tokenizer.ggml.model"].contents() == "llama":
        yield "it gets another tokenizer, whose merges it lacks"
    sections = f"{architecture}.rope.dimension_sections"
    if architecture.startswith("qwen3vl") and sections not in names:
        yield "it gets other rotary sections"
    if architecture == "gemma3" and "gemma3.attention.layer_norm_rms_epsilon" not in names:
        yield "it gets another epsilon"


@pytest.mark.parametrize("name", MODELS)
def test_ollama_reads_our_files_correctly(name: str, tmp_path: Path) -> None:
    made = prepare(checkpoint(name, tmp_path), Options())
    made.close()
    file, pooling = tmp_path / "model.gguf", f"{made.architecture}.pooling_type"
    write_layout(file, made.architecture, made.metadata, made.tensors)
    embeds = any(key.format(arch=made.architecture) == pooling for key in made.metadata)
    assert list(faults(file, embeds)) == []


SCHEMES = ["byte-level", "first", "always", "never", "prepend"]


@pytest.mark.long
@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_server_has_the_sources_tokens(scheme: str, tmp_path: Path) -> None:
    """With each way to prepend a space to a text, including none (`add_space_prefix`)."""
    if not peers_of(pins()).folder.is_dir():
        pytest.skip("llama-server takes minutes to build; make differential does")
    source = checkpoint("llama", tmp_path)
    for file in source.glob("*token*"):
        file.unlink()
    if scheme == "byte-level":
        tokenizer = byte_level(source, [pre.ByteLevel(add_prefix_space=False)])
    else:
        train_sentencepiece(source, "bpe", byte_fallback=True, remove_extra_whitespaces=False)
        tokenizer = reference.reference(source)
        (source / "tokenizer.model").unlink()
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "\u2581")])
        if scheme == "prepend":
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        else:
            tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.save(str(source / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    edit(source / "config.json", vocab_size=size)
    weights = source / "model.safetensors"
    shapes = [
        (i.name, tuple(size if n == 288 else n for n in i.shape)) for i in read_header(weights)
    ]
    files.write_hollow(weights, shapes)
    file = files.converted(source, tmp_path / "model.gguf", "--outtype", "f16")
    kind = llama_server_kind(peers_of(pins()), [])
    server = RunningServer(kind, file, Shape(1, 256), tmp_path)
    try:
        for text in TEXTS:
            if text[0] == " " and scheme in ("first", "always"):
                continue  # Every reader except the worker prepends another space.
            url, body = f"http://127.0.0.1:{server.port}/tokenize", {"content": text}
            answer = httpx.post(url, json=body, trust_env=False)
            assert answer.json()["tokens"] == tokenizer.encode(text).ids, text
    finally:
        server.stop()
