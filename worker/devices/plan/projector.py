"""What a projector takes: weights and a compute buffer on the device, embeddings in memory.

libmtmd cannot lay it out without loading it, so the compute buffer is estimated from the header.
"""

from __future__ import annotations

from worker.models.gguf.header import GgufHeader

EMBEDDINGS_BYTES = 64 << 20
"""Host memory for embeddings of pictures and sounds, which later requests use again."""
_LEAST_COMPUTE = 16 << 20
_POSITIONS = 1500
"""The positions of thirty seconds of sound in encoders like Whisper's."""
_LARGEST_SIDE = 1024
"""The pixels of a picture's side if the file has no number."""
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
"""For each kind of projector that takes any size: the most tokens of a picture, and how many
positions of each side become one token if the file does not say. libmtmd has the same limits,
except for youtuvl, for which its default is 62,500 tokens."""


def kind_of(header: GgufHeader) -> str:
    """libmtmd's name for a projector's kind; the one for pictures, if it has two."""
    kinds = map(header.metadata.get, ("clip.vision.projector_type", "clip.projector_type"))
    return next((kind for kind in kinds if isinstance(kind, str)), "")


def most_tokens(header: GgufHeader) -> int:
    """The most tokens of a picture if its kind takes any size; 0 if file or kind fixes them."""
    return _MOST_TOKENS.get(kind_of(header), (0, 0))[0]


def device_bytes(header: GgufHeader, context_length: int) -> int:
    """Bytes on the device. A picture of more tokens than the context is refused, not encoded."""
    compute = sum(_compute_bytes(header, side, context_length) for side in ("vision", "audio"))
    return header.tensor_bytes + max(compute, _LEAST_COMPUTE)


def _compute_bytes(header: GgufHeader, side: str, context_length: int) -> int:
    """An upper bound of the compute buffer of one encoder: a layer's activations in 32-bit floats
    and, for a picture of the encoder's usual size, the attention scores that it has without flash
    attention."""

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
        n_in_file = number("image_max_pixels", 0) // patch**2
        most = min(max(most_tokens(header) * n_merged, n_in_file), context_length * n_merged)
    scores = number("attention.head_count", 1) * usual**2
    row = 6 * width + 2 * feed_forward
    return 4 * max(usual * row + scores, most * row)
