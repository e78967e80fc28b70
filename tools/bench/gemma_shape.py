"""A random model with Gemma 3 270M's shape and Gemma's 262,144 tokens, for starts on defaults.

Most of it is vocabulary, and its context is far longer than anybody needs, so it shows whether a
worker takes more memory than it must. Runs in the benchmark's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.support.gguf_file import finish
from tools.bench.gguf_files import copy_tokenizer, describe

N_LAYERS, N_EMBD, N_FF, N_HEADS, N_KV_HEADS, HEAD = 18, 640, 2048, 4, 1, 256
CONTEXT_LENGTH, WINDOW = 32_768, 512


def generate(vocabulary: Path, path: Path) -> None:
    """Write the model in Q8_0, with the tokenizer of another GGUF."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(str(path), "gemma3")
    sizes = {"n_layers": N_LAYERS, "n_embd": N_EMBD, "n_ff": N_FF, "n_heads": N_HEADS}
    describe(writer, "random-gemma-shape", context_length=CONTEXT_LENGTH, **sizes)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(WINDOW)
    writer.add_file_type(7)
    n_vocab = copy_tokenizer(writer, vocabulary)
    random = np.random.default_rng(0)
    for name, shape in _tensors(n_vocab):
        if len(shape) == 1:
            writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
            continue
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)
        q8_0 = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quants.quantize(values, q8_0), raw_dtype=q8_0)
    finish(writer)


def _tensors(n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (n_vocab, N_EMBD)
    yield "output_norm.weight", (N_EMBD,)
    for layer in range(N_LAYERS):
        for name, shape in {
            "attn_norm": (N_EMBD,),
            "post_attention_norm": (N_EMBD,),
            "ffn_norm": (N_EMBD,),
            "post_ffw_norm": (N_EMBD,),
            "attn_q_norm": (HEAD,),
            "attn_k_norm": (HEAD,),
            "attn_q": (N_HEADS * HEAD, N_EMBD),
            "attn_k": (N_KV_HEADS * HEAD, N_EMBD),
            "attn_v": (N_KV_HEADS * HEAD, N_EMBD),
            "attn_output": (N_EMBD, N_HEADS * HEAD),
            "ffn_gate": (N_FF, N_EMBD),
            "ffn_up": (N_FF, N_EMBD),
            "ffn_down": (N_EMBD, N_FF),
        }.items():
            yield f"blk.{layer}.{name}.weight", shape
