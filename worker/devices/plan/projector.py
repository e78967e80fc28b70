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
"""Pixels of a picture's side, where the file names none."""
_MOST_TOKENS = {
    **dict.fromkeys(("kimik25", "glm4v", "ling3vl", "muse-glimmer", "youtuvl"), (4096, 2)),
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"), (4096, 2)),
    "gemma4uv": (1120, 1),
    "gemma4v": (1120, 3),
    "kimivl": (1024, 2),
    "pixtral": (1024, 1),
    "minimax_m3": (576, 2),
    "lfm2": (256, 2),
}
"""Of a picture as large as it may be, by the kind of a projector that takes any size; and how many
positions of each side become one token, where the file does not say. libmtmd has the same limits,
but for youtuvl, where it has 62,500 tokens unless it is told."""


def kind_of(header: GgufHeader) -> str:
    """What libmtmd calls a projector's kind; that of pictures, if it has two."""
    kinds = map(header.metadata.get, ("clip.vision.projector_type", "clip.projector_type"))
    return next((kind for kind in kinds if isinstance(kind, str)), "")


def most_tokens(header: GgufHeader) -> int:
    """Of a picture, where its kind takes any size; 0 where the file or the kind says it."""
    return _MOST_TOKENS.get(kind_of(header), (0, 0))[0]


def device_bytes(header: GgufHeader, context_length: int) -> int:
    """Bytes on the device. A picture of more tokens than the context is refused, not encoded."""
    compute = sum(_compute_bytes(header, side, context_length) for side in ("vision", "audio"))
    return header.tensor_bytes + max(compute, _LEAST_COMPUTE)


def _compute_bytes(header: GgufHeader, side: str, context_length: int) -> int:
    """An upper bound of the compute buffer of one encoder: a layer's activations in 32-bit floats,
    and for a picture of the size that the encoder is made for, its attention's scores as if it had
    no flash attention."""

    def number(name: str, default: int) -> int:
        value = header.metadata.get(f"clip.{side}.{name}", default)
        return value if isinstance(value, int) and value > 0 else default

    width, feed_forward = number("embedding_length", 0), number("feed_forward_length", 0)
    if not width:
        return 0
    usual = most = _POSITIONS
    if side == "vision":
        patch, (_, merged) = number("patch_size", 14), _MOST_TOKENS.get(kind_of(header), (0, 2))
        usual = (number("image_size", _LARGEST_SIDE) // patch) ** 2
        n_merged = number("spatial_merge_size", number("projector.scale_factor", merged)) ** 2
        n_told = number("image_max_pixels", 0) // patch**2
        most = min(max(most_tokens(header) * n_merged, n_told), context_length * n_merged)
    scores = number("attention.head_count", 1) * usual**2
    row = 6 * width + 2 * feed_forward
    return 4 * max(usual * row + scores, most * row)
