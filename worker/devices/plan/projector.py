"""What a projector takes: weights and a compute buffer on the device, embeddings in memory.

libmtmd lays nothing out without loading it, so the compute buffer is estimated from the header.
"""

from __future__ import annotations

from worker.models.gguf.header import GgufHeader

EMBEDDINGS_BYTES = 64 << 20
"""For embeddings of pictures and sounds in the host's memory, which later requests use again."""
_LEAST_COMPUTE = 16 << 20
_POSITIONS = 1500
"""Of thirty seconds of sound, for encoders of Whisper's kind."""
_LARGEST_SIDE = 1024
"""Pixels of a picture's side for which libmtmd reserves, where the file names none."""


def device_bytes(header: GgufHeader) -> int:
    """Bytes on the device."""
    compute = sum(_compute_bytes(header, side) for side in ("vision", "audio"))
    return header.tensor_bytes + max(compute, _LEAST_COMPUTE)


def _compute_bytes(header: GgufHeader, side: str) -> int:
    """An upper bound of the compute buffer of one encoder: a layer's activations in 32-bit floats,
    and its attention's scores as if it had no flash attention."""

    def number(name: str, default: int) -> int:
        value = header.metadata.get(f"clip.{side}.{name}", default)
        return value if isinstance(value, int) and value > 0 else default

    width, feed_forward = number("embedding_length", 0), number("feed_forward_length", 0)
    if not width:
        return 0
    n_positions = _POSITIONS
    if side == "vision":
        n_positions = (number("image_size", _LARGEST_SIDE) // number("patch_size", 14)) ** 2
    scores = number("attention.head_count", 1) * n_positions**2
    return 4 * (n_positions * (6 * width + 2 * feed_forward) + scores)
