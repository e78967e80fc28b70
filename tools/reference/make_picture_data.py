"""Makes `tests/data/pictures`: random projectors, as `llorch-convert --mmproj` writes them, and the
embeddings that transformers gives a picture.

`python -m tools.reference.make_picture_data [NAME…]` in an environment with PyTorch and
transformers beside the worker (`make parity-data`); the tests need neither.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file

from tools.reference.make_parity_data import DATA as PARITY
from tools.reference.make_parity_data import random_values
from tools.reference.parity_settings import COMMON, QWEN2_VL, QWEN3_VL
from worker.commands import convert

DATA = PARITY.with_name("pictures")
PATCH, MERGE, N_PATCHES = 4, 2, 12
SIDE = N_PATCHES * PATCH
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
VISION |= {"num_attention_heads": 2, "image_size": SIDE, "patch_size": PATCH}
QWEN: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": PATCH}
DEEPER = {"num_position_embeddings": N_PATCHES**2, "deepstack_visual_indexes": [0, 1]}
WINDOWS = {"intermediate_size": 48, "fullatt_block_indexes": [1], "patch_size": 14}
"""Settings with windows of 8 patches a side, which llama.cpp always uses."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3": (
        "Gemma3Config",
        {"vision_config": VISION, "mm_tokens_per_image": 9}
        | {"text_config": {**COMMON, "head_dim": 16}},
    ),
    "idefics-3": (
        "Idefics3Config",
        {"vision_config": VISION, "scale_factor": MERGE}
        | {"text_config": {"model_type": "llama", **COMMON}},
    ),
    "pixtral": (
        "Mistral3Config",
        {"vision_config": {**VISION, "model_type": "pixtral"}, "spatial_merge_size": MERGE}
        | {"text_config": {"model_type": "mistral", **COMMON, "head_dim": 16}},
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        {**QWEN2_VL, "vision_config": {**QWEN2_VL["vision_config"], **QWEN}},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {"text_config": QWEN2_VL["text_config"]}
        | {"vision_config": {**QWEN, "hidden_size": 32, "out_hidden_size": 64, **WINDOWS}},
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {**QWEN3_VL, "vision_config": {**QWEN3_VL["vision_config"], **QWEN, **DEEPER}},
    ),
}
PREPROCESSOR: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PREPROCESSOR |= {"size": {"longest_edge": SIDE}, "image_seq_length": 9}
PREPROCESSOR |= {"min_pixels": 784, "max_pixels": 12544, "patch_size": PATCH, "merge_size": MERGE}


def main() -> None:
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or MODELS:
        target = DATA / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch, name)
            pixels, rows = make(name, source)
            arguments = [str(source), str(target / "mmproj.gguf"), "--mmproj", "--outtype", "f32"]
            assert convert.run([*arguments, "--progress", "none"]) == 0
        np.savez_compressed(target / "expected.npz", pixels=pixels, rows=rows)


def make(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write a checkpoint; returns a picture, (height, width, 3), and its embeddings: a row for each
    token, followed by the inputs of later layers."""
    kind, settings = MODELS[name]
    config = getattr(transformers, kind)(**settings)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            drawn = random_values(label, parameter, generator, 0.7)
            parameter.copy_(drawn.to(torch.bfloat16).float())
    model.to(torch.bfloat16).save_pretrained(folder)
    model.float()
    if name == "gemma-3":  # as published; transformers drops a part of the names
        path = folder / "model.safetensors"
        before, after = "vision_tower.", "vision_tower.vision_model."
        stored = {label.replace(before, after): each for label, each in load_file(path).items()}
        save_file(stored, path, {"format": "pt"})
    shutil.copytree(PARITY / "tokenizer", folder, dirs_exist_ok=True)
    token = {"content": "[IMG_BREAK]", "special": True}
    tokenizer = folder / "tokenizer_config.json"
    told = json.loads(tokenizer.read_text()) | {"added_tokens_decoder": {"3": token}}
    tokenizer.write_text(json.dumps(told))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    patch = config.vision_config.patch_size
    n_wide = N_PATCHES + (0 if name in ("gemma-3", "idefics-3") else MERGE)
    shape = (N_PATCHES * patch, n_wide * patch, 3)
    pixels = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    scaled = torch.tensor(pixels).permute(2, 0, 1).float() / 127.5 - 1
    with torch.no_grad():
        found = model.get_image_features(**_inputs(name, scaled, patch))
    rows = torch.cat([each.reshape(-1, each.shape[-1]) for each in found.pooler_output])
    deeper = [torch.cat(list(each)) for each in getattr(found, "deepstack_features", None) or ()]
    return pixels, torch.cat([rows, *deeper], dim=1).numpy()


def _inputs(name: str, scaled: torch.Tensor, patch: int) -> dict[str, Any]:
    """Return the projector's input for a picture: (3, height, width), from -1 to 1."""
    _, height, width = scaled.shape
    if not name.startswith("qwen"):
        more = {"image_sizes": torch.tensor([[height, width]])} if name == "pixtral" else {}
        return {"pixel_values": scaled[None, None] if name == "idefics-3" else scaled[None], **more}
    high, wide, block = height // patch, width // patch, (MERGE, patch)
    patches = scaled.expand(2, 3, height, width)
    patches = patches.reshape(2, 3, high // MERGE, *block, wide // MERGE, *block)
    patches = patches.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(high * wide, -1)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, high, wide]])}


if __name__ == "__main__":
    main()
