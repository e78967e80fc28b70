"""Small random projectors, which turn pictures into embeddings of the random models."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFWriter

from tests.support.gguf_file import finish
from tests.support.made import made_once
from tests.support.random_models import N_DEEPSTACK

ProjectorKind = Literal["gemma3", "idefics3", "qwen3vl_merger", "pixtral", "qwen2a"]
WIDTH, HEAD, N_LAYERS = 32, 16, N_DEEPSTACK
IMAGE, PATCH, MERGE = 96, 8, 2
N_TOKENS = (IMAGE // PATCH // MERGE) ** 2
"""Tokens of a picture for gemma3, or of a tile for idefics3."""
MEL_BINS = 80
LONGEST_EDGE = 2 * IMAGE
"""Longest edge to which idefics3 scales a picture before it cuts it into tiles."""

AROUND_TILES = ("ĊĊ", "<fake_token_around_image>", "<global-img>")
"""Tokens that idefics3 needs in the model's vocabulary, as the vocabulary spells them."""


@made_once("mmproj-{kind}.gguf")
def random_projector(path: Path, kind: ProjectorKind, n_embd: int = 64, width: int = WIDTH) -> None:
    """`gemma3`: one part per picture, whose rows attend to each other; `idefics3`: an overview and
    tiles; `qwen3vl_merger`: one part, whose rows have positions in time and space, and additional
    input for the model's first layers; `pixtral`: one part, whose rows depend on the picture's
    shape. All but `qwen2a`, which is for audio, accept another `width`."""
    if kind == "qwen2a":
        _write_ear(path, n_embd)
        return
    writer, random = GGUFWriter(str(path), "clip"), np.random.default_rng(0)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.use_silu" if kind == "pixtral" else "clip.use_gelu", True)
    numbers = {
        "image_size": IMAGE,
        "patch_size": PATCH,
        "embedding_length": width,
        "feed_forward_length": 2 * width,
        "block_count": N_LAYERS,
        "projection_dim": n_embd,
        "attention.head_count": width // HEAD,
        "projector.scale_factor": MERGE,
        "spatial_merge_size": MERGE,
    }
    if kind == "idefics3":
        numbers["preproc_image_size"] = LONGEST_EDGE
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)

    def weights(name: str, *shape: int) -> None:
        scale = np.float32(shape[-1] ** -0.5)
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32) * scale)

    has_bias = kind != "pixtral"

    def linear(name: str, rows: int, columns: int) -> None:
        weights(f"{name}.weight", rows, columns)
        if has_bias:
            weights(f"{name}.bias", rows)

    def norm(name: str, n: int = width, *, bias: bool = has_bias) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(n, dtype=np.float32))
        if bias:
            weights(f"{name}.bias", n)

    weights("v.patch_embd.weight", width, 3, PATCH, PATCH)
    if kind == "qwen3vl_merger":
        weights("v.patch_embd.weight.1", width, 3, PATCH, PATCH)
    if kind == "pixtral":
        norm("v.pre_ln")
    else:
        weights("v.patch_embd.bias", width)
        weights("v.position_embd.weight", (IMAGE // PATCH) ** 2, width)
        norm("v.post_ln")
    merged = width * MERGE * MERGE
    for layer in range(N_LAYERS):
        block = f"v.blk.{layer}"
        if kind == "qwen3vl_merger":
            linear(f"{block}.attn_qkv", 3 * width, width)
            norm(f"v.deepstack.{layer}.norm", merged)
            linear(f"v.deepstack.{layer}.fc1", merged, merged)
            linear(f"v.deepstack.{layer}.fc2", n_embd, merged)
        else:
            for name in ("attn_q", "attn_k", "attn_v"):
                linear(f"{block}.{name}", width, width)
        linear(f"{block}.attn_out", width, width)
        for name in ("ln1", "ln2"):
            norm(f"{block}.{name}")
        linear(f"{block}.ffn_up", 2 * width, width)
        linear(f"{block}.ffn_down", width, 2 * width)
        if kind == "pixtral":
            linear(f"{block}.ffn_gate", 2 * width, width)
    if kind == "idefics3":
        weights("mm.model.fc.weight", n_embd, merged)
    elif kind == "qwen3vl_merger":
        linear("mm.0", merged, merged)
        linear("mm.2", n_embd, merged)
    elif kind == "pixtral":
        norm("mm.input_norm")
        weights("mm.patch_merger.weight", width, merged)
        linear("mm.1", n_embd, width)
        linear("mm.2", n_embd, n_embd)
        weights("v.token_embd.img_break", n_embd)
    else:
        weights("mm.input_projection.weight", width, n_embd)
        norm("mm.soft_emb_norm", bias=False)
    finish(writer)


def _write_ear(path: Path, n_embd: int) -> None:
    """An encoder of Whisper's kind for thirty seconds of sound at a time."""
    writer, random = GGUFWriter(str(path), "clip"), np.random.default_rng(0)
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.projector_type", "qwen2a")
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "block_count": N_LAYERS,
        "projection_dim": n_embd,
        "attention.head_count": WIDTH // HEAD,
        "num_mel_bins": MEL_BINS,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.audio.{name}", number)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)

    def weights(name: str, *shape: int, half: bool = False) -> None:
        scale = np.float32((shape[-1] if len(shape) < 3 else shape[1] * shape[2]) ** -0.5)
        tensor = random.standard_normal(shape, dtype=np.float32) * scale
        writer.add_tensor(name, tensor.astype(np.float16) if half else tensor)

    for layer, rows in ((1, MEL_BINS), (2, WIDTH)):
        weights(f"a.conv1d.{layer}.weight", WIDTH, rows, 3, half=True)
        weights(f"a.conv1d.{layer}.bias", WIDTH, 1)
    weights("a.position_embd.weight", 1500, WIDTH)
    names = [f"a.blk.{layer}.{name}" for layer in range(N_LAYERS) for name in ("ln1", "ln2")]
    for name in (*names, "a.post_ln"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
        weights(f"{name}.bias", WIDTH)
    for layer in range(N_LAYERS):
        block = f"a.blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            weights(f"{block}.{name}.weight", WIDTH, WIDTH)
            if name != "attn_k":
                weights(f"{block}.{name}.bias", WIDTH)
        weights(f"{block}.ffn_up.weight", 2 * WIDTH, WIDTH)
        weights(f"{block}.ffn_up.bias", 2 * WIDTH)
        weights(f"{block}.ffn_down.weight", WIDTH, 2 * WIDTH)
        weights(f"{block}.ffn_down.bias", WIDTH)
    weights("mm.a.fc.weight", n_embd, WIDTH)
    weights("mm.a.fc.bias", n_embd)
    finish(writer)
