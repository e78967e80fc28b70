"""Makes `tests/data/parity`: small random checkpoints and the logits that transformers gives them.

    python -m tests.convert.make_parity_data        (or `make parity-data`)

Needs PyTorch and transformers, which nothing else does; the data is committed. Weights are drawn
wider than models are initialised, so that every part of a model shows in its logits. They are
rounded to the stored type first, and the logits are computed in float32 from the rounded ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

DATA = Path(__file__).parents[1] / "data/parity"
N_VOCAB = 288
N_TOKENS = 24
COMMON = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
}
# llama.cpp looks GELU up in a half-precision table; small activations keep that out of sight.
GAIN = {"GPT2Config": 0.2, "Gemma2Config": 0.9, "Gemma3TextConfig": 0.9}

# Folder: (configuration class, settings beyond COMMON, stored type).
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, "bfloat16"),
    "llama-3.1": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
        "bfloat16",
    ),
    "llama-biases": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
        "float16",
    ),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": None}, "bfloat16"),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        "bfloat16",
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, "bfloat16"),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "bfloat16",
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}, "bfloat16"),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "norm_topk_prob": True,
        },
        "bfloat16",
    ),
    "gemma-2": (
        "Gemma2Config",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
        "bfloat16",
    ),
    "gemma-3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        "bfloat16",
    ),
    "phi-3": ("Phi3Config", {}, "bfloat16"),
    "phi-3-short": (
        "Phi3Config",
        {
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 512},
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 1024,
            "num_hidden_layers": 1,
        },
        "bfloat16",
    ),
    "phi-3-long": (
        "Phi3Config",
        {
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "num_hidden_layers": 1,
        },
        "bfloat16",
    ),
    "olmo-2": ("Olmo2Config", {}, "bfloat16"),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
        "bfloat16",
    ),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}, "bfloat16"),
    "stablelm-12b": (
        "StableLmConfig",
        {"qk_layernorm": True, "use_parallel_residual": True},
        "bfloat16",
    ),
    "gpt-2": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32},
        "bfloat16",
    ),
    "smollm-3": (
        "SmolLM3Config",
        {"num_hidden_layers": 4, "intermediate_size": 64},
        "bfloat16",
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    shutil.rmtree(DATA, ignore_errors=True)
    make_tokenizer(DATA / "tokenizer")
    for seed, (name, (kind, settings, dtype)) in enumerate(MODELS.items()):
        make_model(DATA / name, kind, settings, dtype, seed)
        size = sum(p.stat().st_size for p in (DATA / name).iterdir())
        print(f"{name:14} {size:8,} bytes")
    make_shards(DATA / "llama", DATA / "llama-shards")


def make_tokenizer(folder: Path) -> None:
    """The one that all checkpoints share: byte-level BPE with three special tokens."""
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


def make_model(folder: Path, kind: str, settings: dict[str, Any], dtype: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = getattr(transformers, kind)(**{**COMMON, **settings})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    stored = getattr(torch, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = _values(name, parameter, generator, GAIN.get(kind, 1.2))
            parameter.copy_(drawn.to(stored).float())
        tokens = torch.randint(3, N_VOCAB, (N_TOKENS,), generator=generator)
        logits = model(tokens[None]).logits[0].float()
    model.to(stored).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez(folder / "expected.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


def _values(
    name: str, parameter: torch.Tensor, generator: torch.Generator, gain: float
) -> torch.Tensor:
    drawn = torch.randn(parameter.shape, generator=generator)
    if "norm" in name or "ln_" in name:
        # Gemma's norms are stored less one; a spread around the stored value suits all.
        return parameter + 0.2 * drawn
    if parameter.dim() == 1:
        return 0.2 * drawn
    fan_in = parameter.shape[-1] if "embed" not in name else 4
    return drawn * (gain / fan_in**0.5)


def make_shards(source: Path, folder: Path) -> None:
    """The same checkpoint in several files with an index."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(folder, max_shard_size="80KB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(source / "expected.npz", folder / "expected.npz")


if __name__ == "__main__":
    main()
