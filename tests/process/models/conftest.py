"""A running hub, and a small real GGUF to put on it."""

from __future__ import annotations

from tests.support.hub import gguf_bytes, hub

__all__ = ["gguf_bytes", "hub"]
