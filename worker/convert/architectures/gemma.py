"""Gemma 1 and 2, the text part of Gemma 3, and EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gguf.constants import Keys

from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import if_given, integer, local_theta, number
from worker.convert.family.rules import Family, Metadata
from worker.errors import ModelError
from worker.models.checkpoint_files import DENSE_MODULES

_GELU = {"hidden_activation": ("gelu_pytorch_tanh", None)}


def _scale(n_layers: int) -> Mapping[str, object]:
    """llama.cpp scales by the head's size, or by n_embd / n_head in the 27B model, which it
    recognises by its number of layers."""

    def scalar(d: Dims) -> int:
        return d.n_embd // d.n_head if d.n_layers == n_layers else d.head_dim

    return {"query_pre_attn_scalar": scalar}


GEMMA = Family(
    "gemma",
    ("GemmaForCausalLM",),
    norm_plus=1.0,
    head="never",
    requires={**_GELU, "use_bidirectional_attention": False},
)


def _alternating(d: Dims) -> tuple[list[str], None]:
    return [("sliding_attention", "full_attention")[i % 2] for i in range(d.n_layers)], None


GEMMA2 = Family(
    "gemma2",
    ("Gemma2ForCausalLM",),
    norm_plus=1.0,
    metadata={
        Keys.LLM.ATTN_LOGIT_SOFTCAPPING: number("attn_logit_softcapping"),
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: number("final_logit_softcapping"),
        Keys.Attention.SLIDING_WINDOW: integer("sliding_window"),
    },
    head="never",
    requires={**_GELU, **_scale(46), "layer_types": _alternating},
)


GEMMA3 = Family(
    "gemma3",
    ("Gemma3ForCausalLM",),
    multimodal=("Gemma3ForConditionalGeneration",),
    norm_plus=1.0,
    windows=6,
    metadata={
        Keys.Rope.FREQ_BASE_SWA: local_theta("rope_local_base_freq"),
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: if_given("final_logit_softcapping"),
    },
    requires={
        **_GELU,
        **_scale(62),
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
)


def _dense_metadata(checkpoint: Checkpoint, _d: Dims) -> Metadata:
    found: Metadata = {}
    for module, name in zip(DENSE_MODULES, ("dense_2", "dense_3"), strict=True):
        if (info := checkpoint.tensors.get(f"{module}.linear.weight")) is not None:
            n_out, n_in = info.shape
            found[Keys.LLM.DENSE_FEAT_IN_SIZE.format(arch="{arch}", dense=name)] = n_in
            found[Keys.LLM.DENSE_FEAT_OUT_SIZE.format(arch="{arch}", dense=name)] = n_out
    return found


def _check_embedding(config: Config, _d: Dims) -> None:
    if config.values.get("use_bidirectional_attention") is not True:
        raise ModelError(f"{config.name}: use_bidirectional_attention must be true for embeddings")


EMBEDDING_GEMMA = replace(
    GEMMA3,
    architecture="gemma-embedding",
    names=("Gemma3TextModel",),
    multimodal=(),
    sources={"2_Dense.linear.weight": "dense_2", "3_Dense.linear.weight": "dense_3"},
    metadata={**GEMMA3.metadata, Keys.Attention.CAUSAL: False},
    checkpoint_metadata=_dense_metadata,
    head="none",
    requires={**_GELU, **_scale(62)},
    check=_check_embedding,
)
