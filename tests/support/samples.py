"""Small real GGUF files for tests, written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.gguf_file import finish

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
VOCAB = [f"token{index}" for index in range(40)]


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    vocab: list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    without: frozenset[str] = frozenset(),
    tensors: bool = True,
) -> Path:
    """Write a one-layer model's metadata and a few tensors; `without` omits keys."""
    tokens = VOCAB if vocab is None else vocab
    writer = gguf.GGUFWriter(path, architecture)
    values: dict[str, Any] = {
        "general.name": "A sample",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q8_0),
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": 64,
        f"{architecture}.block_count": 1,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.chat_template": "{{ messages[0].content }}",
        **(overrides or {}),
    }
    for key, value in values.items():
        if key not in without:
            _add(writer, key, value)
    if "tokenizer.ggml.tokens" not in without:
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
    if tensors:
        rng = np.random.default_rng(7)
        writer.add_tensor("token_embd.weight", rng.random((len(tokens), 64), dtype=np.float32))
        blocks = rng.integers(0, 255, (64, 2 * 34), dtype=np.uint8)
        writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    finish(writer)
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def write_split(folder: Path, count: int = 2) -> list[Path]:
    """Write a model in `count` parts with llama.cpp's naming; the first part has the metadata."""
    paths = [folder / f"split-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for key, value in {
                "general.file_type": 0,
                "llama.context_length": 256,
                "llama.embedding_length": 64,
                "llama.block_count": 1,
                "tokenizer.ggml.model": "gpt2",
            }.items():
                _add(writer, key, value)
            writer.add_token_list(VOCAB)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count)
        writer.add_tensor(f"part{number}.weight", np.full((2, 64), number, dtype=np.float32))
        finish(writer)
    return paths
