"""Walks the nested steps of a `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def steps_of(node: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, with sequences flattened."""
    if not isinstance(node, dict):
        return
    if node.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "processors"):
            for child in node.get(key) or []:
                yield from steps_of(child)
    else:
        yield node
