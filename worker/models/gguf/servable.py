"""Refuses a well-formed GGUF that the engine cannot run, before a native loader sees it.

Runs in any thread of any process. For most of these faults, llama.cpp would not report an error but
end the process, by an assertion or an exception that cannot be caught.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from worker.models.gguf.constants import constants
from worker.models.gguf.faults import unusable
from worker.models.gguf.header import GgufHeader, with_metadata
from worker.models.gguf.layout import MAX_BLOCKS, GgufArray, Scalar

MAX_EXPERTS = 1024
"""llama.cpp's own limit on the experts of a layer."""
MAX_HEADS = 2**15 - 1
"""The limit of head counts and head lengths: llama.cpp multiplies them in 32 bits, and a product
that wraps around passes the comparison with the tensors."""

NOT_COMPUTED = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
"""Types that no matrix may have: llama.cpp loads them but cannot compute with them."""
_INDICES = ".ffn_gate_tid2eid."
"""Part of the name of a lookup table, which has integers and takes part in no product."""
_PLAIN = frozenset({"F32", "F16", "BF16"})
"""Types that a norm or a bias may have: it is used element by element."""

_NOT_ROTATED = frozenset(
    "bloom glm5-next gpt2 gptj jais jamba jina-bert-v2 kimi-k3 kimi-linear mamba mamba2 mpt "
    "nemotron_h nemotron_h_moe refact t5encoder".split()
)
"""Architectures with the rope type `NONE` in llama.cpp (`llama_model_rope_type`): they rotate
nothing, so their files may state 0 rotated dimensions."""

NOT_DECODED = {
    "clip": "it holds an image encoder, not a language model",
    "wavtokenizer-dec": "it holds a speech decoder, not a language model",
    "t5": "it is an encoder-decoder model; the worker serves models that only decode or embed",
    **dict.fromkeys(
        ("dream", "llada", "llada-moe", "rnd1"),
        "it is a diffusion model; the worker serves models that decode one token after another",
    ),
}
"""Why this engine cannot run an architecture that llama.cpp loads."""


def check_servable(header: GgufHeader) -> None:
    """Raises `ModelError` naming the first reason why the engine cannot run this model."""
    path = header.path
    kind = header.metadata.get(constants().Keys.General.TYPE, "model")
    if kind != "model":
        raise unusable(path, f"its type is {kind!r}; give the model that it belongs to")
    if header.architecture in NOT_DECODED:
        raise unusable(path, NOT_DECODED[header.architecture])
    if not header.tensors:
        raise unusable(path, "it holds a vocabulary without weights")
    tokens = header.arrays.get(constants().Keys.Tokenizer.LIST)
    if header.tokenizer_kind is None or tokens is None or not tokens.length:
        raise unusable(path, "it has no tokenizer that the worker can use")
    for key in ("context_length", "embedding_length", "block_count"):
        if not getattr(header, key):
            raise unusable(path, f"it has no {header.architecture}.{key} above 0")
    if header.block_count is not None and header.block_count > MAX_BLOCKS:
        raise unusable(path, f"it claims {header.block_count} layers, more than {MAX_BLOCKS}")
    for key, value in header.metadata.items():
        # llama.cpp asserts this while it computes.
        if key.endswith("_epsilon") and not (isinstance(value, float) and 0 <= value < math.inf):
            raise unusable(path, f"{key} is {value}, not a finite, non-negative number")
    check_types(header)
    _check_head(header)
    _check_attention(header)
    _check_experts(header)
    _check_vocabulary(header, tokens)


def check_overridden(header: GgufHeader, values: Mapping[str, Scalar]) -> GgufHeader:
    """The header with these values in place of the file's, checked again if there are any."""
    changed = with_metadata(header, values)
    if values:
        check_servable(changed)
    return changed


def check_types(header: GgufHeader) -> None:
    """Refuse tensors whose type llama.cpp would load, and then abort on when it computes."""
    for tensor in header.tensors:
        if tensor.type_name in NOT_COMPUTED and _INDICES not in tensor.name:
            what = "with which llama.cpp cannot compute"
        elif len(tensor.shape) == 1 and tensor.type_name not in _PLAIN:
            what = "which is only for matrices"
        else:
            continue
        raise unusable(
            header.path, f"tensor {tensor.name!r} has the type {tensor.type_name}, {what}"
        )


def _check_head(header: GgufHeader) -> None:
    """Refuse a reranker without a head of one output: llama.cpp would rank by another number."""
    has_head = any(
        tensor.name == "cls.output.weight"
        or (tensor.name == "cls.weight" and tensor.n_elements == header.embedding_length)
        for tensor in header.tensors
    )
    if header.pooling == "rank" and not has_head:
        raise unusable(header.path, "it is a reranker without a ranking head (cls.output.weight)")


def _check_attention(header: GgufHeader) -> None:
    keys = constants().Keys.Attention
    for key in (
        keys.HEAD_COUNT,
        keys.HEAD_COUNT_KV,
        keys.KEY_LENGTH,
        keys.VALUE_LENGTH,
        keys.KEY_LENGTH_MLA,
        keys.VALUE_LENGTH_MLA,
        keys.KEY_LENGTH_SWA,
        keys.VALUE_LENGTH_SWA,
    ):
        value = header.largest(key)
        if value is not None and value > MAX_HEADS:
            name = key.format(arch=header.architecture)
            raise unusable(header.path, f"{name} is {value}, more than {MAX_HEADS}")
    attends = any(tensor.name.endswith(".attn_q.weight") for tensor in header.tensors)
    if attends and not header.head_count:
        raise unusable(header.path, "it has attention layers, but no attention heads")
    rotated, length = header.largest(constants().Keys.Rope.DIMENSION_COUNT), _key_length(header)
    if rotated == 0 and header.head_count and header.architecture not in _NOT_ROTATED:
        # llama.cpp would compute forever.
        raise unusable(header.path, "it rotates no dimension of its attention heads")
    if rotated is not None and length is not None and rotated > length:
        raise unusable(
            header.path, f"it rotates {rotated} dimensions of attention heads that have {length}"
        )


def _key_length(header: GgufHeader) -> int | None:
    """Length of a head's keys; `None` if neither the file nor llama.cpp's default says it."""
    keys = constants().Keys.Attention
    stated = header.largest(keys.KEY_LENGTH)
    if stated is not None or not header.embedding_length or not header.head_count:
        return stated
    is_uniform = keys.HEAD_COUNT.format(arch=header.architecture) in header.metadata
    return header.embedding_length // header.head_count if is_uniform else None


def _check_experts(header: GgufHeader) -> None:
    keys = constants().Keys.LLM
    count = header.largest(keys.EXPERT_COUNT) or 0
    used = header.largest(keys.EXPERT_USED_COUNT) or 0
    if count <= 1 and header.architecture.startswith("hunyuan"):
        return  # llama.cpp ignores both: a dense model's configuration may have one expert
    if count > MAX_EXPERTS:
        raise unusable(header.path, f"it claims {count} experts a layer, more than {MAX_EXPERTS}")
    if used > count or (count and not used):
        raise unusable(header.path, f"it claims to use {used} of {count} experts a layer")


def _check_vocabulary(header: GgufHeader, tokens: GgufArray) -> None:
    """Check the lists beside the vocabulary, its duplicates, and SentencePiece's byte tokens."""
    keys = constants().Keys.Tokenizer
    for key, item_types in ((keys.SCORES, ("float32", "int32")), (keys.TOKEN_TYPE, ("int32",))):
        array = header.arrays.get(key)
        if array is None:
            continue
        if array.item_type not in item_types or array.length < tokens.length:
            raise unusable(
                header.path,
                f"{key} holds {array.length} {array.item_type} values "
                f"beside a vocabulary of {tokens.length}",
            )
    # As llama.cpp reads them: a text ends at its first NUL, an empty one gets a unique name.
    seen = (raw.partition(b"\0")[0] for raw in tokens.read_bytes())
    distinct = {raw or b"[EMPTY_%d]" % id for id, raw in enumerate(seen)}
    if len(distinct) != tokens.length:
        raise unusable(
            header.path,
            f"its vocabulary of {tokens.length} holds only {len(distinct)} different tokens",
        )
    if header.tokenizer_kind != "gguf-spm":
        return
    if (missing := missing_byte(distinct)) is not None:
        raise unusable(header.path, f"its SentencePiece vocabulary has no token for byte {missing}")


def missing_byte(tokens: Set[bytes]) -> int | None:
    """The first byte that occurs in UTF-8 and has no token; `None` if all have one. SentencePiece
    falls back to byte tokens, and llama.cpp aborts if a text needs one that is missing."""
    bytes_of_texts = (*range(0xC0), *range(0xC2, 0xF5))
    missing = (b for b in bytes_of_texts if tokens.isdisjoint((b"<0x%02X>" % b, bytes([b]))))
    return next(missing, None)
