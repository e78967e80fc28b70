"""Random models with the shapes of small published ones, and what the benchmark's GGUFs share.

`embedder` and `ranker` have MiniLM's shape (BERT, 22 M parameters) and BERT's vocabulary. `gemma`
has Gemma 3 270M's shape and Gemma's 262,144 tokens, for starts on defaults: most of it is
vocabulary, and its context is far longer than anybody needs, so it shows whether a worker takes
more memory than it must. Runs in the benchmark's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.gguf_file import finish

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

Tensor = tuple[str, tuple[int, ...]]
MINILM = {"n_layers": 6, "n_embd": 384, "n_ff": 1536, "n_heads": 12, "context_length": 512}
GEMMA = {"n_layers": 18, "n_embd": 640, "n_ff": 2048, "n_heads": 4, "context_length": 32_768}
N_KV_HEADS, HEAD, WINDOW = 1, 256, 512
"""Gemma's."""
_ADDED = ("position_embd.weight", "token_types.weight")
"""Tensors that llama.cpp adds to each token's row, which it can do only in F32."""


def embedder(vocabulary: Path, path: Path) -> None:
    """Write the model in F16, as such models are served, with the tokenizer of another GGUF."""
    _minilm(vocabulary, path, ranks=False)


def ranker(vocabulary: Path, path: Path) -> None:
    """Write the same trunk with a ranking head."""
    _minilm(vocabulary, path, ranks=True)


def _minilm(vocabulary: Path, path: Path, *, ranks: bool) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, PoolingType

    writer = GGUFWriter(str(path), "bert")
    describe(writer, "random-ranker" if ranks else "random-embedder", **MINILM)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.RANK if ranks else PoolingType.MEAN)
    writer.add_file_type(1)
    n_vocab = copy_tokenizer(writer, vocabulary)
    _draw(writer, _bert_tensors(n_vocab, ranks=ranks), GGMLQuantizationType.F16, norm=1)


def gemma(vocabulary: Path, path: Path) -> None:
    """Write the model in Q8_0, with the tokenizer of another GGUF."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(str(path), "gemma3")
    describe(writer, "random-gemma-shape", **GEMMA)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(WINDOW)
    writer.add_file_type(7)
    n_vocab = copy_tokenizer(writer, vocabulary)
    _draw(writer, _gemma_tensors(n_vocab), GGMLQuantizationType.Q8_0, norm=0)


def describe(
    writer: GGUFWriter,
    name: str,
    *,
    context_length: int,
    n_layers: int,
    n_embd: int,
    n_ff: int,
    n_heads: int,
) -> None:
    """Add the metadata that every model has."""
    writer.add_name(name)
    writer.add_context_length(context_length)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_heads)


def copy_tokenizer(writer: GGUFWriter, vocabulary: Path) -> int:
    """Copy the tokenizer of another GGUF into a file; returns its number of tokens."""
    from gguf import GGUFReader, GGUFValueType

    fields = GGUFReader(str(vocabulary)).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            kind, *items = field.types
            sub_type = items[0] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type)
    return len(fields["tokenizer.ggml.tokens"].data)


def _draw(
    writer: GGUFWriter, tensors: Iterable[Tensor], kind: GGMLQuantizationType, norm: float
) -> None:
    """Write random matrices of this type, norms that are `norm` everywhere, and biases of 0."""
    import numpy as np
    from gguf import GGMLQuantizationType, quants

    random = np.random.default_rng(0)
    for name, shape in tensors:
        if len(shape) == 1:
            value = norm if name.endswith("norm.weight") else 0
            writer.add_tensor(name, np.full(shape, value, dtype=np.float32))
            continue
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)
        own = GGMLQuantizationType.F32 if name in _ADDED else kind
        writer.add_tensor(name, quants.quantize(values, own), raw_dtype=own)
    finish(writer)


def _bert_tensors(n_vocab: int, *, ranks: bool) -> Iterator[Tensor]:
    n_embd, n_ff = MINILM["n_embd"], MINILM["n_ff"]

    def norm(name: str) -> Iterator[Tensor]:
        yield from ((f"{name}.{part}", (n_embd,)) for part in ("weight", "bias"))

    def linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
        yield from ((f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,)))

    yield "token_embd.weight", (n_vocab, n_embd)
    yield "position_embd.weight", (MINILM["context_length"], n_embd)
    yield "token_types.weight", (2, n_embd)
    yield from norm("token_embd_norm")
    for layer in (f"blk.{i}" for i in range(MINILM["n_layers"])):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield from linear(f"{layer}.{part}", n_embd, n_embd)
        yield from linear(f"{layer}.ffn_up", n_ff, n_embd)
        yield from linear(f"{layer}.ffn_down", n_embd, n_ff)
        yield from norm(f"{layer}.attn_output_norm")
        yield from norm(f"{layer}.layer_output_norm")
    if ranks:
        yield from linear("cls", n_embd, n_embd)
        yield from linear("cls.output", 1, n_embd)


def _gemma_tensors(n_vocab: int) -> Iterator[Tensor]:
    n_embd, n_ff, n_heads = GEMMA["n_embd"], GEMMA["n_ff"], GEMMA["n_heads"]
    yield "token_embd.weight", (n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    for layer in range(GEMMA["n_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(("attn_norm", "post_attention_norm"), (n_embd,)),
            **dict.fromkeys(("ffn_norm", "post_ffw_norm"), (n_embd,)),
            **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (HEAD,)),
            "attn_q": (n_heads * HEAD, n_embd),
            **dict.fromkeys(("attn_k", "attn_v"), (N_KV_HEADS * HEAD, n_embd)),
            "attn_output": (n_embd, n_heads * HEAD),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (n_ff, n_embd)),
            "ffn_down": (n_embd, n_ff),
        }
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in shapes.items())
