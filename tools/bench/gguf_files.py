"""What the GGUF files of the benchmark's random models have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import GGUFWriter


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
