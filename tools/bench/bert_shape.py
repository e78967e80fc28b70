"""Random models with MiniLM's shape (BERT, 22 M parameters) and BERT's vocabulary: one embeds, one
ranks texts. Runs in the benchmark's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support.gguf_file import finish
from tools.bench.gguf_files import copy_tokenizer, describe

N_LAYERS, N_EMBD, N_FF, N_HEADS, CONTEXT_LENGTH = 6, 384, 1536, 12, 512
_ADDED = ("position_embd", "token_types")
"""Tensors that llama.cpp adds to each token's row, which it can do only in F32."""


def embedder(vocabulary: Path, path: Path) -> None:
    """Write the model in F16, as such models are served, with the tokenizer of another GGUF."""
    _generate(vocabulary, path, ranks=False)


def ranker(vocabulary: Path, path: Path) -> None:
    """Write the same trunk with a ranking head."""
    _generate(vocabulary, path, ranks=True)


def _generate(vocabulary: Path, path: Path, *, ranks: bool) -> None:
    import numpy as np
    from gguf import GGUFWriter, PoolingType

    writer = GGUFWriter(str(path), "bert")
    sizes = {"n_layers": N_LAYERS, "n_embd": N_EMBD, "n_ff": N_FF, "n_heads": N_HEADS}
    name = "random-ranker" if ranks else "random-embedder"
    describe(writer, name, context_length=CONTEXT_LENGTH, **sizes)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.RANK if ranks else PoolingType.MEAN)
    writer.add_file_type(1)
    n_vocab = copy_tokenizer(writer, vocabulary)
    random = np.random.default_rng(0)
    for name, shape in _matrices(n_vocab, ranks=ranks):
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)
        kind = np.float32 if name in _ADDED else np.float16
        writer.add_tensor(f"{name}.weight", values.astype(kind))
    for name, width, has_weight in _vectors(ranks=ranks):
        if has_weight:
            writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(width, dtype=np.float32))
    finish(writer)


def _matrices(n_vocab: int, *, ranks: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "token_embd", (n_vocab, N_EMBD)
    yield "position_embd", (CONTEXT_LENGTH, N_EMBD)
    yield "token_types", (2, N_EMBD)
    for layer in range(N_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"blk.{layer}.{part}", (N_EMBD, N_EMBD)
        yield f"blk.{layer}.ffn_up", (N_FF, N_EMBD)
        yield f"blk.{layer}.ffn_down", (N_EMBD, N_FF)
    if ranks:
        yield "cls", (N_EMBD, N_EMBD)
        yield "cls.output", (1, N_EMBD)


def _vectors(*, ranks: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield names, widths, and whether it is a norm, which has a weight in addition to its bias."""
    yield "token_embd_norm", N_EMBD, True
    for layer in range(N_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down"):
            yield f"blk.{layer}.{part}", N_EMBD, False
        yield f"blk.{layer}.ffn_up", N_FF, False
        yield f"blk.{layer}.attn_output_norm", N_EMBD, True
        yield f"blk.{layer}.layer_output_norm", N_EMBD, True
    if ranks:
        yield "cls", N_EMBD, False
        yield "cls.output", 1, False
