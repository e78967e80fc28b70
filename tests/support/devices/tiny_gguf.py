"""Random models of any shape, written as GGUF files of a few megabytes.

The vocabulary is a minimal SentencePiece one: control tokens, all 256 bytes and filler words, so
that any text can be tokenised. Weights are noise; only shapes, types and bytes matter here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.gguf_file import finish

CONTROL, BYTE, NORMAL, UNKNOWN = 3, 6, 1, 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama-like model's dimensions."""

    layers: int = 2
    embedding: int = 64
    heads: int = 4
    kv_heads: int = 4
    feed_forward: int = 128
    vocabulary: int = 320
    context: int = 512
    tied: bool = False
    """Whether the embedding is also the output matrix."""
    weight_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32


def write(path: Path, shape: Shape) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.embedding)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.embedding // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    add_vocabulary(writer, shape.vocabulary)
    random = np.random.default_rng(0)
    for name, dimensions in _tensors(shape):
        data = (random.standard_normal(dimensions) * 0.05).astype(np.float32)
        _add_tensor(writer, name, data, shape.weight_type)
    finish(writer)
    return path


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    tokens += [f"w{number}" for number in range(size - len(tokens))]
    kinds += [NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _tensors(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    width, hidden = shape.embedding, shape.feed_forward
    kv_width = width // shape.heads * shape.kv_heads
    found: list[tuple[str, tuple[int, ...]]] = [("token_embd.weight", (shape.vocabulary, width))]
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        found += [
            (f"{block}.attn_norm.weight", (width,)),
            (f"{block}.attn_q.weight", (width, width)),
            (f"{block}.attn_k.weight", (kv_width, width)),
            (f"{block}.attn_v.weight", (kv_width, width)),
            (f"{block}.attn_output.weight", (width, width)),
            (f"{block}.ffn_norm.weight", (width,)),
            (f"{block}.ffn_gate.weight", (hidden, width)),
            (f"{block}.ffn_up.weight", (hidden, width)),
            (f"{block}.ffn_down.weight", (width, hidden)),
        ]
    found.append(("output_norm.weight", (width,)))
    if not shape.tied:
        found.append(("output.weight", (shape.vocabulary, width)))
    return found


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    data: npt.NDArray[np.float32],
    weight_type: gguf.GGMLQuantizationType,
) -> None:
    # llama.cpp needs norms in full precision, whatever the type of the matrices.
    if data.ndim == 1 or weight_type is gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, data)
        return
    packed = gguf.quants.quantize(data, weight_type)
    writer.add_tensor(name, packed, raw_dtype=weight_type)
