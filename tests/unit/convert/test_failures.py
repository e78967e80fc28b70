"""Errors in a checkpoint are reported in a sentence, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support.disk import MountRefused, mounted
from tests.support.held import stopped_before_renaming_to
from tests.unit.convert import files
from tests.unit.convert.files import converted, edit, leave_out, rename, rewritten, verified
from tests.unit.convert.test_parity import DATA, MODELS, checkpoint
from worker.commands import convert as cli
from worker.convert import convert, safetensors
from worker.convert.checkpoint import Checkpoint
from worker.convert.family.rules import Place
from worker.convert.prepare import Options, prepare_checked
from worker.errors import ModelError
from worker.llama import quantize
from worker.models.checkpoint_files import INDEX

TINY = Path(__file__).parents[3] / "worker/assets/tiny-model"
WEIGHTS, SHARD = "model.safetensors", "model-00002-of-00003.safetensors"
TEMPLATE = "chat_template.jinja"


def fails(source: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the message with which a conversion fails."""
    folder = source.parent / "out"
    folder.mkdir()
    code = cli.run([str(source), str(folder / "model.gguf"), "--progress", "none", *flags])
    assert code == 3
    assert list(folder.iterdir()) == []
    sentence = capsys.readouterr().err.strip()
    assert "Traceback" not in sentence and len(sentence.splitlines()) == 1
    return sentence


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def swell_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def unlinked(folder: Path, name: str) -> None:
    """Leave the dangling links of a cleaned hub cache."""
    (folder / name).unlink()
    (folder / name).symlink_to(folder / "gone")


def unfetched(folder: Path, name: str) -> None:
    """Leave what `git clone` writes without Git LFS."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / name).write_text(pointer)


def share_an_id(folder: Path) -> None:
    with rewritten(folder / "tokenizer.json") as tokenizer:
        vocab = tokenizer["model"]["vocab"]
        last, but_one = sorted(vocab, key=vocab.get)[:-3:-1]
        vocab[last] = vocab[but_one]


def end_nowhere(folder: Path) -> None:
    """Remove the end token's name, and tokens that llama.cpp takes for an end."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            edit(folder / name, bos_token=None, eos_token=None, pad_token=None)
    text = (folder / "tokenizer.json").read_text()
    for end in ("<|end_of_text|>", "<|endoftext|>", "</s>", "<|im_end|>", "<|eot_id|>"):
        text = text.replace(end, "<|other" + end[1:])
    (folder / "tokenizer.json").write_text(text)
    edit(folder / "config.json", eos_token_id=99999)
    edit(folder / "generation_config.json", eos_token_id=[99999])


UP = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]


STRAY = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>"}}]}
FAR = {"type": "BertProcessing", "cls": ["<x>", 300], "sep": ["<x>", 300]}

Damage = Callable[[Path], object]


def stated(folder: Path, name: str, key: str, value: object) -> None:
    edit(folder / name, **{key: value})


def config(**values: object) -> Damage:
    return lambda folder: edit(folder / "config.json", **values)


def rope(kind: str, **values: object) -> Damage:
    return config(rope_parameters={"rope_type": kind, "rope_theta": 1e6, "factor": 8.0, **values})


def sections(*numbers: object) -> Damage:
    ropes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": numbers}

    def damage(folder: Path) -> None:
        with rewritten(folder / "config.json") as config:
            config["text_config"]["rope_parameters"] = ropes

    return damage


LLAMA3 = rope(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
CASES: list[tuple[str, Damage, str]] = [
    ("llama", truncate, "truncated"),
    ("llama", swell_header, "header claims"),
    ("llama", lambda f: (f / "model.safetensors").write_bytes(b""), "it is empty; its download"),
    ("llama", lambda f: (f / "config.json").unlink(), "no config.json"),
    ("llama", lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
    *(
        ("llama", lambda f, file=file: edit(f / file, chat_template="\ud800"), "surrogates not")
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json")
    ),
    *(
        ("llama", lambda f, v=v: edit(f / "tokenizer_config.json", chat_template=v), "`$.chat_t")
        for v in (5, {"default": None}, ["{{ x }}"], [{"name": "default"}])
    ),
    ("llama", lambda f: (f / "model.safetensors").unlink(), "no .safetensors"),
    ("llama", lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    ("llama", lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "without any tensor"),
    ("llama", lambda f: (f / TEMPLATE).symlink_to(f / "gone"), "jinja is a dangling link"),
    ("llama", lambda f: (f / TEMPLATE).write_bytes(b"{{ x }} \xff"), f"{TEMPLATE} is not UTF-8"),
    ("llama", lambda f: (f / "generation_config.json").mkdir(), "config.json is not a file"),
    *(
        ("llama", partial(unlinked, name=name), f"{name} is a dangling link")
        for name in ("config.json", "tokenizer.json", "model.safetensors")
    ),
    (
        "llama",
        lambda f: (f / "tokenizer.json").rename(f / "hy.tiktoken"),
        "hy.tiktoken can be read only",
    ),
    *(
        ("llama-shards", partial(unfetched, name=name), f"{name} is a Git LFS pointer")
        for name in ("tokenizer.json", INDEX, SHARD)
    ),
    ("llama-shards", partial(unlinked, name=SHARD), f"{SHARD} is a dangling link"),
    ("llama", config(architectures=["LlamaForCausalLn"]), "LlamaForCausalLM"),
    ("llama", config(architectures=[]), "architectures names no class, such as LlamaForCausalLM"),
    ("llama", config(intermediate_size=128), "shape"),
    ("llama", config(num_hidden_layers=3), "lacks tensor"),
    ("llama", config(num_hidden_layers=1), "not known"),
    ("llama", lambda f: leave_out(f, UP[1]), f"lacks tensor {UP[1]}"),
    ("llama", lambda f: leave_out(f, *UP), "'blk.0.ffn_up.weight' not found"),
    ("llama-shards", lambda f: (f / SHARD).unlink(), SHARD),
    ("llama", config(hidden_size="wide"), "hidden_size"),
    *(
        (name, config(**{key: value}), words or f"{key} must be")
        for name, key, value, words in [
            ("deepseek-v3", "n_group", "x", ""),
            ("deepseek-v3", "first_k_dense_replace", {}, ""),
            ("gpt-2", "n_head", "x", ""),
            ("gpt-2", "n_inner", 2**30, "n_inner is 1073741824, more than"),
            ("gpt-2", "n_layer", 2**30, "n_layer is 1073741824, but the checkpoint has"),
            (
                "starcoder-2",
                "num_attention_heads",
                2**30,
                "head_dim is absent; its default would have",
            ),
            ("nemotron-h", "layers_block_type", [], "layers_block_type must list layers"),
            ("glm-dsa", "indexer_types", 5, ""),
            ("lfm-2", "intermediate_size", -5, ""),
            ("lfm-2-moe", "layer_types", ["conv"], "layers, but the kinds of 1"),
            ("qwen2", "layer_types", 5, ""),
            ("qwen3-next", "layer_types", "x", ""),
            ("qwen3-vl", "vision_config", {"deepstack_visual_indexes": "x"}, "must be a list"),
            ("xlm-roberta", "pad_token_id", [1], ""),
        ]
    ),
    ("gpt-2", config(n_embd=None, hidden_size=-1), "hidden_size must be"),
    ("nemotron-h", config(model_type="x", mamba_num_heads=None), "n_heads or mamba_num_heads"),
    ("nemotron-h", config(layers_block_type=None, layer_types=["x"]), "layer_types must list"),
    ("llama", config(hidden_act="relu"), "hidden_act"),
    ("qwen3-moe", config(norm_topk_prob=None), "norm_topk_prob is False"),
    ("llama", share_an_id, "both have the id"),
    *(
        ("llama", partial(stated, name=name, key=key, value=value), f"llama/{name}: {words}")
        for name, key, value, words in [
            ("tokenizer.json", "added_tokens", [{"content": "x"}], "Object missing required fie"),
            ("tokenizer.json", "model", {"vocab": {"a": "x"}}, "Expected `int`, got `str` - at `$"),
            ("tokenizer.json", "post_processor", {"type": "BertProcessing"}, "Object missing req"),
            ("tokenizer.json", "post_processor", STRAY, "special_tokens lacks '<x>' - at `$.p"),
            ("tokenizer_config.json", "added_tokens_decoder", {"x": {}}, "Expected `int`, got `"),
        ]
    ),
    (
        "llama",
        partial(stated, name="tokenizer.json", key="post_processor", value=FAR),
        "its post_processor adds the token 300, but there are 288",
    ),
    ("llama", lambda f: rename(f / WEIGHTS, "model.norm.weight", "a\x1b[31m\x9bb"), "a·[31m·b"),
    ("llama", rope("novel"), "novel"),
    ("internlm-3", rope("dynamic", original_max_position_embeddings=64), "dynamic up to max_pos"),
    ("internlm-3", rope("dynamic", alpha=2), "dynamic up to max_position_embeddings"),
    ("qwen3", rope("yarn", beta_fast=8), "beta_fast"),
    *(
        ("qwen3-next", rope("default", partial_rotary_factor=share), "dimensions of a head")
        for share in (1.5, 1e9)
    ),
    ("phi-3", rope("default", partial_rotary_factor=1e9), "dimensions of a head would be rotated"),
    ("minimax-m2", config(rotary_dim=2**30), "dimensions of a head would be rotated, but"),
    *(
        (
            "phi-3",
            rope("longrope", long_factor=[1.0] * 8, short_factor=[factor] * 8),
            "short_factor must have 8 numbers above 0",
        )
        for factor in (1e300, "x")
    ),
    ("qwen3-vl", sections(3, 3, 2**40), "must be up to four numbers"),
    ("qwen3-vl", sections(3, 3, "x"), "must be up to four numbers"),
    ("qwen3", rope("yarn", truncate=False), "truncate"),
    *((name, LLAMA3, "llama3") for name in ("qwen2", "qwen3", "smollm-3", "olmo-2", "stablelm")),
    *(
        ("qwen3", config(quantization_config={"quant_method": method, key: value}), words)
        for method, key, value, words in [
            ("quanto", "bits", 4, "quantised by quanto cannot be converted; fp8,"),
            ("gptq", "checkpoint_format", "gptq_p", "by gptq (gptq_p)"),
            ("gptq", "checkpoint_format", 7, "checkpoint_format must be a string"),
            ("gptq", "format", "marlin", "by gptq (marlin)"),
            ("awq", "version", "gemv", "by awq (gemv)"),
            ("awq", "checkpoint_format", "llm-awq", "by awq (llm-awq)"),
            ("awq", "bits", 8, "by awq (8 bits)"),
            ("awq", "w_bit", "four", "by awq ('four' bits)"),
        ]
    ),
    (
        "qwen3",
        config(quantization_config={"quant_method": "compressed-tensors", "format": "marlin-24"}),
        "quantised by compressed-tensors (marlin-24)",
    ),
    (
        "qwen3",
        config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}),
        "quantised by modelopt (NVFP4_AWQ)",
    ),
    *(
        (
            "qwen3",
            config(**{key: {"group_size": 32, "bits": 4, **others}}),
            "quantised by MLX (mxfp6)",
        )
        for key in ("quantization", "quantization_config")
        for others in ({"mode": "mxfp6"}, {"lm_head": {"bits": 4, "mode": "mxfp6"}})
    ),
]


@pytest.mark.parametrize(("name", "damage", "words"), CASES)
def test_damage_is_named(
    name: str, damage: Damage, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(name, tmp_path)
    damage(source)
    assert words in fails(source, capsys)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-shards"])
def test_a_tensor_that_all_layers_lack_is_reported(name: str, tmp_path: Path) -> None:
    """Each kind of tensor in turn, whether or not llama.cpp requires it."""
    source = checkpoint(name, tmp_path)
    kinds: dict[str, list[str]] = {}
    for info in safetensors.read_header(source / "model.safetensors"):
        kinds.setdefault(Place.of(info.name).form, []).append(info.name)
    for form, names in kinds.items():
        kept = {file: file.read_bytes() for file in source.glob("*.safetensors")}
        leave_out(source, *names)
        try:
            prepare_checked(source, Options()).close()
        except ModelError:
            pass
        else:
            assert re.match(r"visual\.|pooler\.", form), f"{form} is not missed"
        for file, data in kept.items():
            file.write_bytes(data)


@pytest.mark.parametrize(
    ("bits", "outtype", "words"),
    [
        pytest.param(b"\x80\x7e", "f16", "F16 cannot hold; bf16 and f32 can", id="8.5e37"),
        *(
            pytest.param(bits, outtype, "has a NaN or an infinity in its source")
            for bits in (b"\xc0\x7f", b"\x80\xff")
            for outtype in ("bf16", "f16", "f32", "q8_0", "q4_k_m")
        ),
    ],
)
def test_a_value_that_the_type_cannot_hold_is_refused(
    bits: bytes, outtype: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("llama", tmp_path)
    path = source / "model.safetensors"
    header, data = files.read(path)
    begin = header["model.layers.1.mlp.up_proj.weight"]["data_offsets"][0]
    files.write(path, header, data[:begin] + bits + data[begin + 2 :])
    sentence = fails(source, capsys, "--outtype", outtype)
    assert "blk.1.ffn_up.weight" in sentence and words in sentence


def add_head(source: Path, is_own: bool) -> None:
    """Add a head of zeros, or a copy of the embedding."""
    header, data = files.read(source / "model.safetensors")
    embedding = header["model.embed_tokens.weight"]
    first, end = embedding["data_offsets"]
    header["lm_head.weight"] = {**embedding, "data_offsets": [len(data), len(data) + end - first]}
    head = bytes(end - first) if is_own else data[first:end]
    files.write(source / "model.safetensors", header, data + head)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_head_that_the_configuration_ties_is_named(
    is_own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trained one is kept, like in transformers, whose older releases stored both."""
    source = Path(shutil.copytree(TINY, tmp_path / "tied"))
    add_head(source, is_own)
    target = converted(source, tmp_path / "m.gguf")
    error = capsys.readouterr().err
    assert ("note: the output head is kept: tie_word_embeddings is true" in error) is is_own
    assert ("note: left out lm_head.weight: the embedding" in error) is not is_own
    names = [tensor.name for tensor in gguf.GGUFReader(target).tensors]
    assert ("output.weight" in names) is is_own


@pytest.mark.parametrize("is_own", [True, False])
def test_a_head_that_llama_cpp_cannot_store_must_equal_the_embedding(
    is_own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("gemma", tmp_path)
    edit(source / "config.json", tie_word_embeddings=False)
    add_head(source, is_own)
    if is_own:
        assert "output head that differs from its embedding" in fails(source, capsys)
    else:
        converted(source, tmp_path / "m.gguf")


def test_a_folder_whose_name_is_not_utf_8_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    checkpoint("llama", folder)
    monkeypatch.chdir(folder)
    target = converted(Path("llama"), Path("m.gguf"))
    assert verified(Path("llama"), target) == 0


def test_ends_beyond_the_vocabulary_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without another one would never stop."""
    source = Path(shutil.copytree(TINY, tmp_path / "ends"))
    edit(source / "generation_config.json", eos_token_id=[0, 99999])
    converted(source, tmp_path / "m.gguf")
    assert "note: left out eos_token_id 99999: the vocabulary has" in capsys.readouterr().err
    end_nowhere(source)
    assert "no other token ends a text: the model would never stop" in fails(source, capsys)


@pytest.mark.parametrize("number", ["-1", "0", "1e3", "1025", "", "9" * 5000])
def test_an_invalid_number_of_threads_is_refused(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.gguf"
    with pytest.raises(SystemExit) as left:
        cli.run([str(TINY), str(target), "--threads", number])
    assert left.value.code == 2 and not target.exists()
    assert "--threads" in (error := capsys.readouterr().err)
    assert "is not a whole number from 1 to 1024" in error


def test_json_progress_ends_with_the_error(tmp_path: Path) -> None:
    shutil.copytree(DATA / "llama", tmp_path / "llama")
    command = [sys.executable, "-m", "worker.commands.convert", str(tmp_path / "llama")]
    command += [str(tmp_path / "x.gguf"), "--progress", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 3 and last["error"]["code"] == "MODEL_LOAD_FAILED"
    assert "tokenizer" in last["error"]["message"]


def test_the_reason_of_an_abort_of_llama_cpp_is_reported(tmp_path: Path) -> None:
    """And not the end of the stack trace after it."""
    source = checkpoint("llama", tmp_path)
    with rewritten(source / "tokenizer.json") as tokenizer:
        # It ignores everything after a NUL, so that two tokens become equal.
        added, last = tokenizer["added_tokens"], max(tokenizer["model"]["vocab"].values())
        added.append({**added[0], "id": last, "content": "a\0b"})
    command = [sys.executable, "-m", "worker.commands.convert", str(source), str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("llorch-convert: llama.cpp cannot load the model: ")
    assert "GGML_ASSERT(id_to_token.size()" in done.stderr


def conversion(command: list[str], target: Path, folder: Path) -> subprocess.Popen[str]:
    """A conversion that stops before its last step, so that it is incomplete when it is killed."""
    return subprocess.Popen(
        [*command, "--progress", "json"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | stopped_before_renaming_to(target, folder),
    )


@pytest.mark.parametrize(
    "outtype", ["q4_k_m", "q4_0", pytest.param("q2_k", marks=pytest.mark.long)]
)
def test_quantised_types_verify_against_their_source(
    outtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = converted(TINY, tmp_path / "model.gguf", "--outtype", outtype)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
    assert verified(TINY, target) == 0
    assert cli.run(["inspect", str(target)]) == 0
    before = target.stat().st_mtime_ns
    assert cli.run([str(TINY), str(target), "--outtype", outtype, "--progress", "none"]) == 2
    assert target.stat().st_mtime_ns == before, "nothing is replaced unasked"
    printed = capsys.readouterr().out
    assert "llorch.convert.source_sha256" in printed and f" {outtype}\n" in printed
    assert verified(checkpoint("llama", tmp_path), target) == 3


def test_a_kill_in_any_phase_leaves_nothing_that_loads(tmp_path: Path) -> None:
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    command = [sys.executable, "-m", "worker.commands.convert", str(TINY), str(target)]
    command += ["--outtype", "q4_k_m"]
    # Each begins with the leftovers of the last one.
    for phase in ("convert", "quantize", "verify"):
        child = conversion(command, target, tmp_path)
        assert child.stdout is not None
        while json.loads(child.stdout.readline()).get("phase") != phase:
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        files = {path.suffix for path in target.parent.rglob("*") if path.is_file()}
        assert files == {".lock", ".partial"}
    other = target.with_name("other.gguf")
    command[4:] = [str(other), "--progress", "none"]
    assert subprocess.run(command, check=False).returncode == 0
    assert [*target.parent.iterdir()] == [other] and verified(TINY, other) == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    command = [sys.executable, "-m", "worker.commands.convert", str(TINY), str(target)]
    child = conversion([*command, "--outtype", "q4_k_m"], target, tmp_path)
    assert child.stdout is not None
    try:
        while json.loads(child.stdout.readline()).get("phase") != "quantize":
            pass
        child.send_signal(how)
        child.send_signal(signal.SIGCONT)  # it may have stopped by now
        child.communicate()
    finally:
        child.kill()
    assert child.returncode == 130
    assert list(target.parent.iterdir()) == []


def test_a_conversion_that_gets_no_thread_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert cli.run([str(TINY), str(tmp_path / "model.gguf"), "--progress", "none"]) == 1
    assert "raise ulimit -u, -v or -d" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including the intermediate file of a K-quant, which is larger than the result."""
    room = (64 << 20) + 4_500_000
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=room))
    target = converted(TINY, tmp_path / "out/model.gguf", "--outtype", "q8_0")
    target.unlink()
    assert cli.run([str(TINY), str(target), "--outtype", "q4_k_m", "--progress", "none"]) == 3
    sentence = capsys.readouterr().err
    assert f"{room:,} bytes free" in sentence and "needs" in sentence
    assert list(target.parent.iterdir()) == []
    with monkeypatch.context() as without:
        without.setattr("worker.convert.weights.check_space", lambda *_: None)
        converted(TINY, target, "--outtype", "q4_k_m")
    assert verified(TINY, target) == 3
    words = f"{target.parent} has {room:,} bytes free, quantising again, to compare model.gguf with"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outtype", "room", "words"),
    [
        ("q8_0", "16k", "disk/m.gguf: No space left on device"),
        ("q8_0", "1m", "disk/m.gguf: No space left on device"),
        ("q4_k_m", "6m", " bytes free"),
    ],
)
def test_a_disk_that_others_fill_meanwhile_is_named(
    outtype: str,
    room: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There was enough room when the conversion began."""
    monkeypatch.setattr("worker.convert.weights.check_space", lambda *_: None)
    disk = tmp_path / "disk"
    with ExitStack() as mounts:
        try:
            mounts.enter_context(mounted(disk, f"size={room}"))
        except MountRefused:
            pytest.skip("only root may mount")
        arguments = [str(TINY), str(disk / "m.gguf"), "--outtype", outtype, "--progress", "none"]
        assert cli.run(arguments) == 3
        assert words in capsys.readouterr().err
        assert list(disk.iterdir()) == []


def test_a_file_system_that_syncs_no_folder_has_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(file)

    monkeypatch.setattr("os.fsync", fsync)
    target = converted(TINY, tmp_path / "m.gguf")
    assert verified(TINY, target) == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_files_of_the_source_are_not_overwritten(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint("llama", tmp_path)
    before = (source / name).read_bytes()
    assert cli.run([str(source), str(source / name), "--overwrite", "--progress", "none"]) == 2
    assert f"{name} is read for this conversion" in capsys.readouterr().err
    assert (source / name).read_bytes() == before


def test_the_importance_matrix_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (matrix := tmp_path / "matrix.gguf").write_bytes(b"hours of work")
    (tmp_path / "link.gguf").symlink_to(matrix)
    flags = ["--outtype", "q4_k_m", "--imatrix", str(matrix), "--overwrite", "--progress", "none"]
    for name in ("matrix.gguf", "link.gguf"):
        assert cli.run([str(TINY), str(tmp_path / name), *flags]) == 2
        assert f"{name} is read for this conversion" in capsys.readouterr().err
    assert matrix.read_bytes() == b"hours of work"


def test_an_importance_matrix_that_nothing_would_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "m.gguf"
    flags = ["--outtype", "q8_0", "--imatrix", str(tmp_path / "nowhere"), "--progress", "none"]
    assert cli.run([str(TINY), str(target), *flags]) == 2
    assert "--imatrix is given, but nothing uses it" in capsys.readouterr().err
    made = converted(TINY, tmp_path / "made.gguf", "--outtype", "f16")
    assert verified(TINY, made, *flags[2:]) == 2
    assert "--imatrix is given, but nothing uses it for f16" in capsys.readouterr().err
    made.unlink()
    flags = ["--outtype", "q4_k_m", "--imatrix", str(TINY), "--progress", "none"]
    assert cli.run([str(TINY), str(target), *flags]) == 3
    assert f"--imatrix {TINY} is not a file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    matrix = tmp_path / "another.gguf"
    files.write_importance(matrix, {"blk.99.ffn_up.weight": np.linspace(1, 9, 256)})
    flags = ["--outtype", "q4_k_m", "--imatrix", str(matrix), "--progress", "none"]
    assert cli.run([str(TINY), str(target), *flags]) == 3
    assert "measures none of the model's tensors" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [matrix]


def test_the_reason_of_an_abort_of_the_quantiser_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "__name__", "tests.unit.convert.aborting_quantiser")
    sentence = fails(checkpoint("llama", tmp_path), capsys, "--outtype", "q4_k_m")
    assert sentence.endswith(": GGML_ASSERT(n_dims > 0) failed.")


@pytest.mark.parametrize("outtype", ["q8_0", "q4_k_m"])
def test_a_name_is_as_long_as_the_disk_permits(
    outtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = converted(TINY, tmp_path / ("a" * 255), "--outtype", outtype)
    assert verified(TINY, target) == 0
    assert cli.run([str(TINY), f"{target}a", "--outtype", outtype, "--progress", "none"]) == 3
    assert "aa: File name too long" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [target]


def test_a_target_that_is_not_a_file_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        path = tmp_path / name
        before = os.lstat(path)
        assert cli.run([str(TINY), str(path), "--overwrite", "--progress", "none"]) == 2
        assert f"{path} exists and is not a file" in capsys.readouterr().err
        after = os.lstat(path)  # reading a link sets st_atime
        assert (after.st_ino, after.st_mode, after.st_ctime_ns) == (
            before.st_ino,
            before.st_mode,
            before.st_ctime_ns,
        )
    assert len(list(tmp_path.iterdir())) == 3


def test_no_gguf_gets_the_name_of_a_checkpoints_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker would try to read SafeTensors from it."""
    path = tmp_path / "out.safetensors"
    assert cli.run([str(TINY), str(path), "--progress", "none"]) == 2
    assert f"{path} would be a GGUF; name a file that ends in .gguf" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["inspect m.gguf", "list", "cache"])
def test_a_command_that_shows_no_progress_has_no_such_flag(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.run([*command.split(), "--progress", "json"])
    assert exit.value.code == 2
    words = f"--progress is not a flag of llorch-convert {command.split()[0]}"
    assert words in capsys.readouterr().err


def test_a_single_file_takes_precedence_over_an_index(tmp_path: Path) -> None:
    """Like in transformers: saving a model again into its folder leaves the old index."""
    source, other = checkpoint("llama-shards", tmp_path), checkpoint("llama", tmp_path)
    before = Checkpoint.open(source).tensors
    shutil.copy(other / WEIGHTS, source)
    found = Checkpoint.open(source).tensors
    assert {info.path.name for info in found.values()} == {WEIGHTS}
    assert found.keys() == Checkpoint.open(other).tensors.keys()
    # An index that names both has one file for all tensors and another for additional ones.
    index = {"weight_map": dict.fromkeys(found, WEIGHTS)}
    (source / INDEX).write_text(json.dumps(index))
    assert Checkpoint.open(source).tensors.keys() == found.keys()
    assert before.keys() == found.keys()


def test_a_file_that_appeared_during_a_conversion_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"

    def while_another_writes(*arguments: Any) -> Any:
        path.write_text("another's")
        return prepare_checked(*arguments)

    monkeypatch.setattr(convert, "prepare_checked", while_another_writes)
    assert cli.run([str(TINY), str(path), "--progress", "none"]) == 3
    assert "m.gguf appeared during the conversion and is kept" in capsys.readouterr().err
    assert path.read_text() == "another's" and [*tmp_path.iterdir()] == [path]
    assert cli.run([str(TINY), str(path), "--overwrite", "--progress", "none"]) == 0


@pytest.mark.parametrize("name", [None, "\udcff"])
def test_a_name_that_is_not_utf_8_is_refused(
    name: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The folder's name, which becomes the model's, or the given one."""
    monkeypatch.chdir(tmp_path)
    source = "a\udcff" if name is None else "a"
    os.symlink(TINY, source)
    more = [] if name is None else ["--name", name]
    assert cli.run([source, "m.gguf", *more, "--progress", "none"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == [source]


def test_a_closed_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    assert cli.run([str(TINY), str(tmp_path / "m.gguf"), "--progress", "none"]) == 0
    command = [sys.executable, "-m", "worker.commands.convert", "inspect", str(tmp_path / "m.gguf")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()
    _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (128 + signal.SIGPIPE, b"")


def test_with_closed_standard_files_a_model_is_written_correctly(tmp_path: Path) -> None:
    command = f"{sys.executable} -m worker.commands.convert {TINY} {tmp_path}/m.gguf <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert cli.run(["verify", str(TINY), str(tmp_path / "m.gguf"), "--progress", "none"]) == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [("nope", "; among those that it has are gpt-2, "), ("qwen", "; did you mean qwen2?")],
)
def test_a_pre_tokenizer_that_llama_cpp_does_not_have_is_refused_by_its_flag(
    name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "m.gguf"
    flags = ["--pre-tokenizer", name, "--progress", "none"]
    assert cli.run([str(TINY), str(target), *flags]) == 2
    error = capsys.readouterr().err
    assert f"--pre-tokenizer is {name!r}, which llama.cpp does not have{hint}" in error
    assert ".llorch-scratch" not in error and list(tmp_path.iterdir()) == []
