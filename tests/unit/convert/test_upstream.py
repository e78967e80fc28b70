"""Models that llama.cpp's own converter reads for us: the refusal without PyTorch, the limits, and
random checkpoints whose logits equal transformers'."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from builds import sdist
from builds.pins import pins
from tests.conftest import StartWorker
from tests.support.worker import WorkerProcess
from tests.unit.convert import engine, named, rebuild
from tests.unit.convert.files import converted, edit, rename, verified
from tests.unit.convert.published import DATA as DEFINITIONS
from tests.unit.convert.test_definitions import N_VOCAB
from tests.unit.convert.test_failures import fails
from tests.unit.convert.test_parity import DATA, checkpoint
from tests.unit.convert.test_quantised_sources import stored_by_package
from tools.reference.parity_settings import COMMON, QWEN2_VL, QWEN3_VL
from worker.commands import convert as cli
from worker.convert import upstream
from worker.convert.architectures import FAMILIES
from worker.convert.checkpoint import Checkpoint
from worker.convert.prepare import Options, prepare
from worker.errors import ModelError
from worker.models.gguf.header import GgufHeader, read_header

VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
VISION |= {"num_attention_heads": 2}
HAS_TORCH = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs llorch-worker[torch]")
TEKKEN = Path(__file__).parents[2] / "data/tekken"
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4}
MIMO_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.334}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", {}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
        | {"mamba_d_state": 16, "mamba_chunk_size": 8, "head_dim": 16, "key_multiplier": 0.7},
    ),
    "falcon-mamba": ("FalconMambaConfig", {"state_size": 8, "intermediate_size": 128}),
    "gpt-bigcode": ("GPTBigCodeConfig", {"n_layer": 2, "n_head": 4, "n_embd": 64}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "jamba": ("JambaConfig", {"num_hidden_layers": 8, "use_mamba_kernels": False, **EXPERTS}),
    "kimi-linear": (
        "KimiLinearConfig",
        {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
        | {"linear_head_dim": 16, "linear_num_heads": 4, "num_key_value_heads": 4}
        | {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mamba": ("MambaConfig", {"state_size": 8, "intermediate_size": 128}),
    "mamba-2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2}
        | {"chunk_size": 8, "expand": 2, "intermediate_size": 128},
    ),
    "mimo-2": (
        "MiMoV2FlashConfig",
        {"num_hidden_layers": 3, "head_dim": 24, "v_head_dim": 16, "sliding_window": 8}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"rope_parameters": {kind: MIMO_ROPE for kind in ("full_attention", "sliding_attention")}}
        | {"n_shared_experts": None},
    ),
    "mpt": (
        "MptConfig",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}
        | {"saved_as": "MPTForCausalLM"},
    ),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt-neox": {"rotary_pct": 0.25},
    "kimi-linear": {"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1}
    | {"moe_router_activation_func": "sigmoid", "moe_renormalize": True, "num_expert_group": 1}
    | {"moe_layer_freq": 1, "first_k_dense_replace": 1}
    | {
        "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 16}
        | {"num_heads": 4, "short_conv_kernel_size": 4}
    },
    "mimo-2": {"rope_parameters": MIMO_ROPE, "hybrid_layer_pattern": [0, 1, 0]}
    | {"moe_layer_freq": [0, 1, 1], "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
    | {"swa_head_dim": 24, "swa_v_head_dim": 16, "swa_rope_theta": 1e6, "rope_theta": 1e6}
    | {"layernorm_epsilon": 1e-5, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
"""Keys that published configurations have and transformers no longer saves."""
RENAMED = {"kimi-linear": (".0.block_sparse_moe", ".0.mlp")}
"""Parts of tensor names that transformers saves differently than published ones."""
WANTED = """KimiLinearForCausalLM DeepseekV32ForCausalLM DeepseekV4ForCausalLM MiMoV2ForCausalLM
MiMoV2FlashForCausalLM Step3p5ForCausalLM NomicBertModel JinaBertModel JinaBertForMaskedLM
XLMRobertaModel Qwen3ForCausalLM Qwen3Model Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration MiniMaxM2ForCausalLM
KimiK25ForConditionalGeneration Qwen2VLForConditionalGeneration Qwen3VLForConditionalGeneration
Ministral3ForCausalLM Mistral4ForCausalLM""".split()
"""Models that people commonly convert."""


def test_list_shows_our_models_and_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["list", "--families"]) == 0
    own, _, others = capsys.readouterr().out.partition("with llama.cpp's own converter")
    assert "LlamaForCausalLM" in own and "BloomForCausalLM" not in own
    assert "BloomForCausalLM" in others and "LlamaForCausalLM" not in others.split()
    names = [name for line in own.splitlines()[:-1] for name in line.split(", ")]
    assert len(set(names)) > 50
    assert len({line.index(line.split()[1]) for line in own.splitlines()[:-1]}) == 1, "a column"


def test_commonly_converted_models_are_known_to_us_or_the_script() -> None:
    """Prints the list; a name that neither supports does not exist in llama.cpp's converter."""
    own = {name for family in FAMILIES for name in family.names}
    missing = upstream.classes() - own
    print(f"{len(own)} ours, {len(missing)} by llama.cpp's own converter:", *sorted(missing))
    print("asked for:", *(f"{name} {'ours' if name in own else 'the script'};" for name in WANTED))
    assert [name for name in WANTED if name not in own | upstream.classes()] == []
    assert len(upstream.classes()) > 200
    assert {"LlamaForCausalLM", "Qwen3ForCausalLM"} <= own & upstream.classes()


@pytest.mark.skipif(bool(HAS_TORCH), reason="PyTorch is here")
def test_without_pytorch_the_refusal_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("llama", tmp_path)
    edit(source / "config.json", architectures=["BloomForCausalLM"])
    assert ".venv/bin/pip install --editable '.[torch]'" in fails(source, capsys)


def test_disk_space_is_needed_for_the_scripts_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 4-bit weight becomes 32 bits: 64 x 96 of them, and another matrix of that size."""
    stored_by_package("gptq", tmp_path)
    monkeypatch.setattr(upstream, "folder", lambda: tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    free = shutil.disk_usage(tmp_path)._replace(free=64 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    with pytest.raises(ModelError, match=f"needs {(64 << 20) + 2 * 4 * 64 * 96:,}"):
        upstream.convert(Checkpoint.open(tmp_path), tmp_path)


def test_an_error_after_the_script_leaves_no_file_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, scratch = checkpoint("llama", tmp_path), tmp_path / "scratch"
    scratch.mkdir()
    written = converted(source, tmp_path / "upstream.gguf", "--outtype", "f32")
    edit(source / "config.json", architectures=["BloomForCausalLM"])

    def convert(_source: Checkpoint, folder: Path, _projector: str) -> GgufHeader:
        return read_header(Path(shutil.copy(written, folder)))

    monkeypatch.setattr(upstream, "convert", convert)
    options = Options("q4_k_m", imatrix=tmp_path / "nowhere", scratch=scratch)
    with pytest.raises(ModelError, match="--imatrix .*nowhere"):
        prepare(source, options)
    assert list(scratch.iterdir()) == []


@needs_torch
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.timeout(900)
def test_logits_equal_those_of_transformers(
    name: str, tmp_path: Path, start_worker: StartWorker
) -> None:
    from tools.reference.make_parity_data import make_model

    source, target = tmp_path / name, tmp_path / "model.gguf"
    make_model(source, *MODELS[name], seed=1)
    shutil.copytree(DATA / "tokenizer", source, dirs_exist_ok=True)
    edit(source / "config.json", **PUBLISHED.get(name, {}))
    if name in RENAMED:
        rename(source / "model.safetensors", *RENAMED[name])
    expected = np.load(source / "expected.npz")
    for outtype in ("q4_k_m", "f32"):
        converted(source, target, "--overwrite", "--outtype", outtype)
    assert verified(source, target) == 0
    got, wanted = engine.logits(target, expected["tokens"].tolist()), expected["logits"]
    difference = np.abs(got - wanted).max() / np.abs(wanted).max()
    print(f"{name} {read_header(target).architecture} {difference:.0e}")
    assert difference <= 5e-3  # For Falcon-H1 the script rounds its multipliers.
    assert read_header(target).metadata["llorch.convert.script"] == "convert_hf_to_gguf.py"
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", name}
    streams(start_worker("--model", str(target)))


def streams(worker: WorkerProcess) -> None:
    """Check that `llorch-cpu` serves the model, with an event for each token."""
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    with worker.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert len([event for event in events if event["choices"]]) > 1
    worker.stop()


@needs_torch
@pytest.mark.long
@pytest.mark.parametrize("name", named.MODELS)
@pytest.mark.timeout(900)
def test_published_names_are_converted_and_served(
    name: str, tmp_path: Path, start_worker: StartWorker
) -> None:
    """Every tensor has the same values as in the file of llama.cpp's own converter."""
    source = tmp_path / name
    named.write(name, source)
    embeds = "bert" in name
    if embeds:
        from tools.reference.make_parity_data import write_pooling

        named.write_wordpiece(source)
        write_pooling(source, "mean")
    else:
        shutil.copytree(DATA / "tokenizer", source, dirs_exist_ok=True)
    target = converted(source, tmp_path / "model.gguf", "--outtype", "bf16")
    assert verified(source, target) == 0
    (tmp_path / "script").mkdir()
    scripts = upstream.convert(Checkpoint.open(source), tmp_path / "script").path
    own = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    for tensor in gguf.GGUFReader(scripts).tensors:
        got, wanted = (
            each.data
            if each.tensor_type == gguf.GGMLQuantizationType.I32
            else gguf.dequantize(each.data, each.tensor_type)
            for each in (own.pop(tensor.name), tensor)
        )
        assert np.array_equal(got.reshape(-1), wanted.reshape(-1)), tensor.name
    assert not own
    worker = start_worker("--model", str(target))
    if not embeds:
        streams(worker)
        return
    with worker.client() as client:
        answer = client.post("/v1/embeddings", json={"input": ["hello", "a stone"]})
    assert answer.status_code == 200, answer.text
    vectors = np.array([each["embedding"] for each in answer.json()["data"]])
    assert vectors.shape == (2, named.N) and np.isfinite(vectors).all() and vectors.any()
    assert not np.array_equal(*vectors)
    worker.stop()


@needs_torch
@pytest.mark.long
@pytest.mark.parametrize("name", [*N_VOCAB, "tekken", "llama-spm"])
def test_real_tokenizers_are_converted_by_the_script(name: str, tmp_path: Path) -> None:
    import transformers  # type: ignore[import-not-found]

    source, n_vocab = tmp_path / name, N_VOCAB.get(name, 32000)
    if name == "tekken":
        n_vocab = json.loads((TEKKEN / "tekken.json").read_text())["config"]["default_vocab_size"]
    settings = {**COMMON, "vocab_size": n_vocab, "hidden_size": 32, "state_size": 8}
    settings |= {"intermediate_size": 64}
    config = transformers.MambaConfig(**settings)
    transformers.MambaForCausalLM(config).bfloat16().save_pretrained(source)
    if name == "llama-spm":
        models = sdist.unpacked(pins()) / "vendor/llama.cpp/models"
        rebuild.write_model(rebuild.Source(models / "ggml-vocab-llama-spm.gguf"), source)
    for file in (TEKKEN / "tekken.json", *(DEFINITIONS / name).glob("*")):
        if name == "tekken" or file.parent.name == name:
            shutil.copy(file, source)
    header = read_header(converted(source, tmp_path / "model.gguf", "--outtype", "bf16"))
    assert header.vocab_size == n_vocab
    assert header.metadata["llorch.convert.script"] == "convert_hf_to_gguf.py"
    print(
        f"{name}: {n_vocab} tokens, {header.metadata.get('llorch.convert.difference', 'same ids')}"
    )


PROJECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3": (
        "Gemma3Config",
        {"vision_config": {**VISION, "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 1}
        | {"text_config": {**COMMON, "head_dim": 16}},
    ),
    "idefics-3": (
        "Idefics3Config",
        {"vision_config": {**VISION, "image_size": 56, "patch_size": 14}, "scale_factor": 2}
        | {"text_config": {"model_type": "llama", **COMMON}},
    ),
    "pixtral": (
        "Mistral3Config",
        {"vision_config": {**VISION, "model_type": "pixtral", "image_size": 56, "patch_size": 14}}
        | {"text_config": {"model_type": "mistral", **COMMON, "head_dim": 16}},
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        {**QWEN2_VL, "vision_config": {**QWEN2_VL["vision_config"], "depth": 3}},
    ),
    "qwen3-vl": ("Qwen3VLConfig", QWEN3_VL),
}
PREPROCESSOR: dict[str, Any] = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"longest_edge": 56},
}
PREPROCESSOR |= {"min_pixels": 784, "max_pixels": 12544, "patch_size": 14, "merge_size": 2}


@needs_torch
@pytest.mark.long
@pytest.mark.parametrize("name", PROJECTORS)
def test_a_projector_is_converted_by_the_script_and_verified(name: str, tmp_path: Path) -> None:
    import transformers

    kind, settings = PROJECTORS[name]
    source, target = tmp_path / name, tmp_path / "mmproj.gguf"
    config = getattr(transformers, kind)(**settings)
    transformers.AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(source)
    shutil.copytree(DATA / "tokenizer", source, dirs_exist_ok=True)
    if name == "gemma-3":  # As published; transformers drops a part of the names.
        rename(source / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")
    token = {"content": "[IMG_BREAK]", "special": True}
    edit(source / "tokenizer_config.json", added_tokens_decoder={"3": token})
    (source / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    for outtype in ("q8_0", "f16"):
        converted(source, target, "--mmproj", "--overwrite", "--outtype", outtype)
    assert verified(source, target) == 0
    header = read_header(target)
    assert (header.architecture, header.metadata["general.type"]) == ("clip", "mmproj")
    print(f"{name} {header.metadata.get('clip.projector_type')} {len(header.tensors)} tensors")
    assert {path.name for path in tmp_path.iterdir()} == {"mmproj.gguf", name}


def test_a_model_without_a_projector_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("llama", tmp_path)
    assert "the projector of this" in fails(source, capsys, "--mmproj")


@needs_torch
@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: edit(folder / "config.json", num_attention_heads="four"), "failed:"),
        (lambda folder: edit(folder / "config.json", hidden_size=10**12), "failed:"),
        (lambda folder: edit(folder / "config.json", num_hidden_layers=10**9), ""),
        (lambda folder: (folder / "config.json").write_text(json.dumps([1])), "object"),
    ],
)
def test_a_failure_of_the_script_is_reported(
    change: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("llama", tmp_path)
    edit(source / "config.json", architectures=["BloomForCausalLM"])
    change(source)
    assert words in fails(source, capsys)
