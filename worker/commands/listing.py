"""Headers, registries and the cache as text: the output of `inspect`, `list` and `cache`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from worker.models.gguf.header import GgufHeader
from worker.models.gguf.layout import Scalar
from worker.models.registry import Registry
from worker.models.stored import SHOWN_KEY, StoredModel

LONGEST_VALUE = 72


def header_lines(header: GgufHeader) -> Iterator[str]:
    facts: dict[str, Scalar | None] = {
        "file": str(header.path),
        "parts": len(header.parts),
        "size": size_text(header.size_bytes),
        "version": header.version,
        "architecture": header.architecture,
        "name": header.name,
        "quantization": header.quant_kind,
        "parameters": f"{header.n_params:,}",
        "context length": header.context_length,
        "embedding length": header.embedding_length,
        "layers": header.block_count,
        "heads": header.head_count,
        "KV heads": header.head_count_kv,
        "tokenizer": header.tokenizer_kind,
        "vocabulary": header.vocab_size,
        "pooling": header.pooling,
        "chat template": "yes" if header.chat_template else "no",
    }
    for label, value in facts.items():
        if value is not None:
            yield f"{label:<17} {printable(value)}"
    yield ""
    yield "tensor types"
    for type_name, n_bytes in header.tensor_types().items():
        count = sum(tensor.type_name == type_name for tensor in header.tensors)
        yield f"  {type_name:<8} {count:>5} tensors  {size_text(n_bytes):>10}"
    yield ""
    yield "metadata"
    width = max((len(key) for key in header.types), default=0)
    for key, value in header.summary().items():
        yield f"  {printable(key):<{width}}  {header.types[key]:<8} {printable(value)}"
    yield ""
    yield "tensors"
    width = max((len(tensor.name) for tensor in header.tensors), default=0)
    for tensor in header.tensors:
        shape = " x ".join(str(extent) for extent in tensor.shape)
        yield f"  {printable(tensor.name):<{width}}  {tensor.type_name:<8} {shape}"


def registry_text(registry: Registry) -> str:
    head = ("ALIAS", "PARAMETERS", "QUANTIZATION", "CONTEXT", "SIZE", "DESCRIPTION")
    rows = [
        (
            alias,
            entry.parameters or "",
            entry.quantization or "",
            str(entry.context_length or ""),
            size_text(entry.size_bytes) if entry.size_bytes else "",
            entry.description or entry.source,
        )
        for alias, entry in registry.entries.items()
    ]
    return f"{_table([head, *rows])}\n\nfrom {registry.file}"


def stored_text(stored: Sequence[StoredModel], folder: Path) -> str:
    rows = [
        (
            each.key[:SHOWN_KEY],
            each.kind,
            size_text(each.size_bytes),
            time.strftime("%Y-%m-%d", time.localtime(each.last_used)),
            printable(each.name),
        )
        for each in stored
    ]
    total = size_text(sum(each.size_bytes for each in stored))
    head = ("KEY", "KIND", "SIZE", "LAST USED", "MODEL")
    return f"{_table([head, *rows])}\n\n{total} of downloads and conversions in {folder}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def size_text(n_bytes: int) -> str:
    """A size in decimal units, as is usual for disks and downloads."""
    size = float(n_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def printable(value: Scalar) -> str:
    """A value on one line, without control characters; long texts are shortened."""
    text = str(value)
    line = "".join(char if char.isprintable() else "·" for char in text[: LONGEST_VALUE + 1])
    if len(line) <= LONGEST_VALUE:
        return line
    return f"{line[:LONGEST_VALUE]}… ({len(text)} characters)"
