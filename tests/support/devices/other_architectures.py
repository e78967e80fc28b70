"""A tiny random model without a cache, in addition to those of `random_models`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.support.devices.tiny_gguf import add_vocabulary
from tests.support.gguf_file import finish

WIDTH, HIDDEN, VOCABULARY, LAYERS, CONTEXT = 64, 128, 320, 4, 2048


def encoder(path: Path) -> Path:
    """BERT: embeds a text in one pass and keeps no cache."""
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_vocab_size(VOCABULARY)
    add_vocabulary(writer, VOCABULARY)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-6)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(2)
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (VOCABULARY, WIDTH)),
        ("token_types.weight", (2, WIDTH)),
        ("position_embd.weight", (CONTEXT, WIDTH)),
        ("token_embd_norm.weight", (WIDTH,)),
        ("token_embd_norm.bias", (WIDTH,)),
    ]
    for layer in range(LAYERS):
        for name in ("attn_output_norm", "layer_output_norm"):
            tensors += [(f"blk.{layer}.{name}.{part}", (WIDTH,)) for part in ("weight", "bias")]
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors.append((f"blk.{layer}.{name}.weight", (WIDTH, WIDTH)))
        tensors.append((f"blk.{layer}.ffn_up.weight", (HIDDEN, WIDTH)))
        tensors.append((f"blk.{layer}.ffn_down.weight", (WIDTH, HIDDEN)))
    random = np.random.default_rng(0)
    for name, shape in tensors:
        writer.add_tensor(name, (random.standard_normal(shape) * 0.05).astype(np.float32))
    finish(writer)
    return path
