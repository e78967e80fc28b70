"""Tiny random models whose memory is not laid out like Llama's, beside those of `random_models`.

`hybrid` is quantised and has one matrix for embedding and output; `encoder` keeps nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests.support.devices.tiny_gguf import add_vocabulary
from tests.support.gguf_file import finish

WIDTH, HIDDEN, VOCABULARY, LAYERS, CONTEXT = 64, 128, 320, 4, 2048
HEADS = WIDTH // 32
"""Of 32 channels each: a quantized KV cache holds blocks of that many."""
Q4_0 = gguf.GGMLQuantizationType.Q4_0
Dimensions = list[tuple[str, tuple[int, ...]]]


def _write(
    path: Path,
    architecture: str,
    describe: Callable[[gguf.GGUFWriter], Dimensions],
    *,
    quantized: bool = False,
    vocabulary: int = VOCABULARY,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_vocab_size(vocabulary)
    add_vocabulary(writer, vocabulary)
    random = np.random.default_rng(0)
    for name, dimensions in describe(writer):
        data = (random.standard_normal(dimensions) * 0.05).astype(np.float32)
        if quantized and len(dimensions) == 2 and dimensions[1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(data, Q4_0), raw_dtype=Q4_0)
        else:
            writer.add_tensor(name, data)
    finish(writer)
    return path


def hybrid(path: Path) -> Path:
    """LFM2: short convolutions in every other layer, and the embedding once more as the output."""
    vocabulary = 4096

    def describe(writer: gguf.GGUFWriter) -> Dimensions:
        writer.add_head_count(HEADS)
        writer.add_head_count_kv([HEADS if layer % 2 else 0 for layer in range(LAYERS)])
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_shortconv_l_cache(3)
        tensors: Dimensions = [("token_embd.weight", (vocabulary, WIDTH))]
        for layer in range(LAYERS):
            mixer: Dimensions = [
                ("shortconv.conv", (WIDTH, 3)),
                ("shortconv.in_proj", (3 * WIDTH, WIDTH)),
                ("shortconv.out_proj", (WIDTH, WIDTH)),
            ]
            if layer % 2:
                names = ("attn_q", "attn_k", "attn_v", "attn_output")
                norms = ("attn_q_norm", "attn_k_norm")
                mixer = [(name, (WIDTH, WIDTH)) for name in names]
                mixer += [(name, (WIDTH // HEADS,)) for name in norms]
            rest: Dimensions = [
                ("attn_norm", (WIDTH,)),
                ("ffn_norm", (WIDTH,)),
                ("ffn_gate", (HIDDEN, WIDTH)),
                ("ffn_up", (HIDDEN, WIDTH)),
                ("ffn_down", (WIDTH, HIDDEN)),
            ]
            tensors += [(f"blk.{layer}.{name}.weight", shape) for name, shape in [*mixer, *rest]]
        return [*tensors, ("token_embd_norm.weight", (WIDTH,))]

    return _write(path, "lfm2", describe, quantized=True, vocabulary=vocabulary)


def encoder(path: Path) -> Path:
    """BERT: embeds a text in one go and keeps no cache."""

    def describe(writer: gguf.GGUFWriter) -> Dimensions:
        writer.add_head_count(HEADS)
        writer.add_layer_norm_eps(1e-6)
        writer.add_causal_attention(False)
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_token_type_count(2)
        tensors: Dimensions = [
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
        return tensors

    return _write(path, "bert", describe)
