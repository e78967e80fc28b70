"""Our converter against llama.cpp's own script, on a 1.1 B-parameter checkpoint of random weights.

    python -m tools.bench.convert_bench --peer-python VENV/bin/python

The peer's Python needs PyTorch, transformers and sentencepiece; the script comes from the pinned
sources. Runs alternate, so that a busy machine slows both, and begin after all dirty pages have
been written. The report has the medians of wall time and of processor time, and the largest sum of
resident memory over all processes of a run; tensors are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import gguf
import numpy as np
import psutil

from builds import sdist
from builds.pins import pins
from tests.unit.convert import rebuild

LAYERS, WIDTH, FFN, HEADS, KV_HEADS, VOCAB, SHARDS = 22, 2048, 5632, 32, 4, 32000, 3
SAMPLE_SECONDS = 0.25
"""Rarely: each scan of all processes takes milliseconds away from a run with two threads."""


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    cpu_seconds: float
    peak_bytes: int


OURS = [sys.executable, "-m", "worker.commands.convert"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="convert_bench", description=__doc__)
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder for the checkpoint (7 GB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--outtypes", nargs="+", default=["f16", "bf16", "q8_0"])
    parser.add_argument(
        "--layers",
        type=int,
        default=LAYERS,
        help="fewer make a smaller checkpoint, for a quick run",
    )
    options = parser.parse_args(arguments)
    sources = sdist.unpacked(pins()) / "vendor/llama.cpp"
    work = options.work or Path(tempfile.mkdtemp(prefix="convert-bench-"))
    try:
        checkpoint = make_checkpoint(work / f"random-{options.layers}", sources, options.layers)
        for outtype in options.outtypes:
            ours = [*OURS, str(checkpoint)]
            compare(ours, checkpoint, sources, options.peer_python, outtype, options.rounds, work)
    finally:
        if options.work is None:
            shutil.rmtree(work)
    return 0


def compare(
    ours_command: list[str],
    checkpoint: Path,
    sources: Path,
    peer_python: Path,
    outtype: str,
    rounds: int,
    work: Path,
) -> None:
    mine, theirs = work / f"ours-{outtype}.gguf", work / f"peer-{outtype}.gguf"
    ours_command = [*ours_command, str(mine), "--outtype", outtype, "--progress", "none"]
    script = str(sources / "convert_hf_to_gguf.py")
    peer_command = [str(peer_python), script, str(checkpoint), "--outfile", str(theirs)]
    peer_command += ["--outtype", outtype]
    ours, peer = [], []
    for _ in range(rounds):
        mine.unlink(missing_ok=True)
        theirs.unlink(missing_ok=True)
        ours.append(measure(ours_command))
        peer.append(measure(peer_command))
    seconds = median(r.seconds for r in ours), median(r.seconds for r in peer)
    cpu = median(r.cpu_seconds for r in ours), median(r.cpu_seconds for r in peer)
    memory = max(r.peak_bytes for r in ours), max(r.peak_bytes for r in peer)
    report = {
        "outtype": outtype,
        "seconds": {"ours": round(seconds[0], 2), "peer": round(seconds[1], 2)},
        "seconds_share": round(seconds[0] / seconds[1], 3),
        "cpu_seconds": {"ours": round(cpu[0], 2), "peer": round(cpu[1], 2)},
        "cpu_share": round(cpu[0] / cpu[1], 3),
        "all_seconds": [[round(r.seconds, 2) for r in runs] for runs in (ours, peer)],
        "peak_mib": {"ours": memory[0] >> 20, "peer": memory[1] >> 20},
        "peak_share": round(memory[0] / memory[1], 3),
        "different_tensors": list(differences(mine, theirs)),
    }
    print(json.dumps(report), flush=True)
    mine.unlink()
    theirs.unlink()


def measure(command: Sequence[str]) -> Run:
    """Run the command to its end, summing the resident memory of the process and its children."""
    os.sync()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    process = psutil.Popen(
        list(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    peak = 0
    while process.poll() is None:
        try:
            tree = [process, *process.children(recursive=True)]
            peak = max(peak, sum(p.memory_info().rss for p in tree))
        except psutil.NoSuchProcess:
            continue
        time.sleep(SAMPLE_SECONDS)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if process.returncode != 0:
        raise SystemExit(f"{command[:3]} failed: {process.stderr.read()[-2000:]}")
    return Run(seconds, cpu, peak)


def differences(mine: Path, theirs: Path) -> Iterator[str]:
    ours = {t.name: t for t in gguf.GGUFReader(mine).tensors}
    peer = {t.name: t for t in gguf.GGUFReader(theirs).tensors}
    yield from sorted(ours.keys() ^ peer.keys())
    for name in sorted(ours.keys() & peer.keys()):
        a, b = ours[name], peer[name]
        if a.tensor_type != b.tensor_type or list(a.shape) != list(b.shape):
            yield f"{name}: {a.tensor_type.name} {a.shape} and {b.tensor_type.name} {b.shape}"
        elif not np.array_equal(a.data.view(np.uint8), b.data.view(np.uint8)):
            yield name


def make_checkpoint(folder: Path, sources: Path, layers: int) -> Path:
    if (folder / "model.safetensors.index.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    source = rebuild.Source(sources / "models/ggml-vocab-llama-spm.gguf")
    rebuild.write_model(source, folder)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    shapes = list(_shapes(layers))
    per_shard = -(-len(shapes) // SHARDS)
    weight_map: dict[str, str] = {}
    for i in range(SHARDS):
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(shapes[i * per_shard : (i + 1) * per_shard])
        _write_shard(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = WIDTH // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCAB, WIDTH)
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (WIDTH,)
        for x, rows in (("q", WIDTH), ("k", kv), ("v", kv), ("o", WIDTH)):
            yield f"{layer}.self_attn.{x}_proj.weight", (rows, WIDTH)
        yield f"{layer}.post_attention_layernorm.weight", (WIDTH,)
        yield f"{layer}.mlp.gate_proj.weight", (FFN, WIDTH)
        yield f"{layer}.mlp.up_proj.weight", (FFN, WIDTH)
        yield f"{layer}.mlp.down_proj.weight", (WIDTH, FFN)
    yield "model.norm.weight", (WIDTH,)
    yield "lm_head.weight", (VOCAB, WIDTH)


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write normally distributed BF16 values, drawn once and shifted from tensor to tensor."""
    pool = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)
    pool = (pool.view(np.uint32) >> 16).astype(np.uint16)
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, shape in enumerate(shapes.values()):
            values = np.roll(pool, 7919 * i)
            left = int(np.prod(shape))
            while left:
                file.write(values[:left].data)
                left -= min(left, len(values))


if __name__ == "__main__":
    sys.exit(main())
