"""Makes `tests/data/parity`: small random checkpoints and the logits that transformers gives them.

    python -m tools.reference.make_parity_data [NAME…]        (or `make parity-data`)

Needs PyTorch and transformers, which nothing else does; the data is committed. Weights have a
larger deviation than usual initialisations, so that every part of a model affects its logits. They
are rounded to the stored type first, and the logits are computed in float32 from the rounded ones.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from safetensors.torch import save_file

from tools.reference.parity_models import MODELS
from tools.reference.parity_settings import COMMON, GAIN, N_VOCAB

DATA = Path(__file__).parents[2] / "tests/data/parity"
N_TOKENS = 24


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    wanted = sys.argv[1:] or list(MODELS)
    if not sys.argv[1:]:
        shutil.rmtree(DATA, ignore_errors=True)
        make_tokenizer(DATA / "tokenizer")
    for seed, (name, (kind, settings)) in enumerate(MODELS.items()):
        if name in wanted:
            shutil.rmtree(DATA / name, ignore_errors=True)
            make_model(DATA / name, kind, settings, seed)
            size = sum(p.stat().st_size for p in (DATA / name).rglob("*"))
            print(f"{name:14} {size:8,} bytes", flush=True)
    if "llama" in wanted:
        make_shards(DATA / "llama", DATA / "llama-shards")


def make_tokenizer(folder: Path) -> None:
    """Make the tokenizer that all checkpoints share: byte-level BPE with three special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    assert tokenizer.get_vocab_size() == N_VOCAB
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _sentences() -> Iterable[str]:
    words = "the then there other one tone stone on in ring thing and hand".split()
    return (" ".join(words[i:] + words[:i]) for i in range(len(words)))


def make_model(folder: Path, kind: str, settings: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    settings = dict(settings)
    pooling, dense = settings.pop("pooling", None), settings.pop("dense", False)
    ranks = settings.pop("ranks", False)
    saved_as = settings.pop("saved_as", None)
    stored = getattr(torch, settings.pop("stored", "bfloat16"))
    config = getattr(transformers, kind)(**{**COMMON, **settings})
    config._attn_implementation = "eager"
    kind_of_model = transformers.AutoModel if pooling else transformers.AutoModelForCausalLM
    if "vision_config" in settings:
        kind_of_model = transformers.AutoModelForImageTextToText
    if ranks:
        kind_of_model = transformers.AutoModelForSequenceClassification
    if kind == "Mistral4Config":  # Not in any Auto class.
        model = transformers.Mistral4ForCausalLM(config).float().eval()
    else:
        model = kind_of_model.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = random_values(name, parameter, generator, GAIN.get(kind, 1.2))
            parameter.copy_(drawn.to(stored).float())
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(random_values(name, buffer, generator, 1.0).to(stored).float())
        tokens = torch.randint(3, N_VOCAB, (N_TOKENS,), generator=generator)
        found = model(tokens[None])
        expected = pooled(found.last_hidden_state[0], pooling) if pooling else found.logits[0]
    model.to(stored).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if saved_as:
        values = json.loads((folder / "config.json").read_text()) | {"architectures": [saved_as]}
        (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    if pooling:
        write_pooling(folder, pooling)
    if dense:
        expected = write_dense(folder, expected, stored, generator)
    kind_of_value = "vector" if pooling else "ranks" if ranks else "logits"
    values = {kind_of_value: expected.float().numpy()}
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), **values)


def pooled(rows: torch.Tensor, pooling: str) -> torch.Tensor:
    return {"mean": rows.mean(0), "cls": rows[0], "lasttoken": rows[-1]}[pooling]


def write_pooling(folder: Path, pooling: str) -> None:
    """Write the pooling as sentence-transformers does."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=1))
    (folder / "1_Pooling").mkdir()
    flags = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    settings = {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
    (folder / "1_Pooling/config.json").write_text(json.dumps(settings, indent=1))


def write_dense(
    folder: Path, vector: torch.Tensor, stored: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Write two modules that widen a vector and narrow it again; returns the transformed
    `vector`."""
    modules = json.loads((folder / "modules.json").read_text())
    n = len(vector)
    widths = {"2_Dense": (n, 4 * n), "3_Dense": (4 * n, n)}
    for name, sizes in widths.items():
        weight = random_values(name, torch.empty(sizes[::-1]), generator, 1.0).to(stored)
        vector = weight.float() @ vector
        settings: dict[str, Any] = {"in_features": sizes[0], "out_features": sizes[1]}
        settings |= {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings, indent=1))
        save_file({"linear.weight": weight}, folder / name / "model.safetensors")
        modules.insert(-1, {"path": name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules, indent=1))
    return vector


def random_values(
    name: str, parameter: torch.Tensor, generator: torch.Generator, gain: float
) -> torch.Tensor:
    drawn = torch.randn(parameter.shape, generator=generator)
    if "norm" in name.lower() or "ln_" in name:
        # Gemma stores its norms minus one; random values around the stored one suit all.
        return parameter + 0.2 * drawn
    if parameter.dim() == 1:
        return 0.2 * drawn
    fan_in = parameter.shape[-1] if "embed" not in name else 4
    return drawn * (gain / fan_in**0.5)


def make_shards(source: Path, folder: Path) -> None:
    """Write the same checkpoint in several files with an index."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(folder, max_shard_size="80KB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(source / "expected.npz", folder / "expected.npz")


if __name__ == "__main__":
    main()
