"""Gemma 1 and 2, the text part of Gemma 3, and EmbeddingGemma."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules
from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.errors import ModelError
from worker.models.checkpoint_files import DENSE_MODULES

_GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
    "rope_theta": 1_000_000.0,
    "query_pre_attn_scalar": 256,
}
"""Defaults for keys that the `text_config` of multimodal checkpoints leaves out."""


def norms(plus: float = 1.0) -> Rules:
    """Norms before and after attention and feed-forward; weights are stored less `plus`."""
    return blocks.norms(
        plus=plus,
        input_layernorm="attn_norm",
        post_attention_layernorm="post_attention_norm",
        pre_feedforward_layernorm="ffn_norm",
        post_feedforward_layernorm="post_ffw_norm",
    )


_RULES: Rules = {
    **blocks.embeddings(norm_plus=1.0),
    **norms(),
    **blocks.attention(biases=False),
    **blocks.gated_mlp(),
}


def _gemma2(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.rms_metadata(arch, config, d),
        Keys.LLM.ATTN_LOGIT_SOFTCAPPING: config.number("attn_logit_softcapping"),
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: config.number("final_logit_softcapping"),
        Keys.Attention.SLIDING_WINDOW: config.integer("sliding_window"),
    }


def _gemma3(arch: str, config: Config, d: Dims) -> Metadata:
    config = _with_defaults(config)
    found = blocks.rms_metadata(arch, config, d)
    theta = config.number("rope_theta")
    found |= blocks.rope_metadata(arch, config, d.head_dim, theta)
    if config.has("final_logit_softcapping"):
        found[Keys.LLM.FINAL_LOGIT_SOFTCAPPING] = config.number("final_logit_softcapping")
    if config.values.get("sliding_window_pattern") != 1:
        found[Keys.Attention.SLIDING_WINDOW] = config.integer("sliding_window")
        found[Keys.Attention.SLIDING_WINDOW_PATTERN] = _sliding_layers(config, d)
        local = config.section("rope_parameters").section("sliding_attention")
        base = local.number(
            "rope_theta", default=config.number("rope_local_base_freq", default=1e4)
        )
        found[Keys.Rope.FREQ_BASE_SWA] = base
    return found


def _sliding_layers(config: Config, d: Dims) -> list[bool]:
    """The layers that see only a window; by default all but every sixth."""
    if config.has("layer_types"):
        return [kind == "sliding_attention" for kind in config.items("layer_types")]
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return [(i + 1) % period != 0 for i in range(d.n_layers)]


def _with_defaults(config: Config) -> Config:
    present = {key: value for key, value in config.values.items() if value is not None}
    return Config({**_GEMMA3_DEFAULTS, **present}, config.name)


def _check_gemma2(config: Config, d: Dims) -> None:
    _check(config, d, family_layers=46)
    pattern = [("sliding_attention", "full_attention")[i % 2] for i in range(d.n_layers)]
    blocks.require(config, layer_types=(pattern, None))


def _check_gemma3(config: Config, d: Dims) -> None:
    _check(_with_defaults(config), d, family_layers=62)
    blocks.require(config, attn_logit_softcapping=None)
    blocks.require(config, use_bidirectional_attention=(False, None))


def _check(config: Config, d: Dims, family_layers: int) -> None:
    blocks.require(config, hidden_activation=("gelu_pytorch_tanh", None))
    # llama.cpp scales by the head's size, in the 27B model by n_embd / n_head.
    scalar = d.n_embd // d.n_head if d.n_layers == family_layers else d.head_dim
    if not math.isclose(config.number("query_pre_attn_scalar", default=scalar), scalar):
        raise ModelError(
            f"{config.name}: query_pre_attn_scalar must be {scalar}, "
            "llama.cpp's implementation of Gemma has it fixed"
        )


GEMMA2 = Family(
    architecture="gemma2",
    names=("Gemma2ForCausalLM",),
    rules=_RULES,
    metadata=_gemma2,
    head="never",
    check=_check_gemma2,
)

GEMMA3 = Family(
    architecture="gemma3",
    names=("Gemma3ForCausalLM",),
    rules={**_RULES, **blocks.head_norms(plus=1.0)},
    metadata=_gemma3,
    dims=lambda config: Dims.of(_with_defaults(config)),
    check=_check_gemma3,
)

GEMMA3_MULTIMODAL = replace(
    GEMMA3,
    names=("Gemma3ForConditionalGeneration",),
    section="text_config",
    roots=("model.", "model.language_model.", "language_model.model."),
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
)
"""The text part; the vision tensors are left out."""


def _embedding_dims(config: Config) -> Dims:
    d = GEMMA3.dims(config)
    return replace(d, more={"dense": 4 * d.n_embd})


def _embedding(arch: str, config: Config, d: Dims) -> Metadata:
    return _gemma3(arch, config, d) | {Keys.Attention.CAUSAL: False}


def _dense_metadata(checkpoint: Checkpoint, d: Dims) -> Metadata:
    if f"{DENSE_MODULES[0]}.linear.weight" not in checkpoint.tensors:
        return {}
    sizes = (("dense_2", d.n_embd, d.more["dense"]), ("dense_3", d.more["dense"], d.n_embd))
    found: Metadata = {}
    for name, n_in, n_out in sizes:
        found[Keys.LLM.DENSE_FEAT_IN_SIZE.format(arch="{arch}", dense=name)] = n_in
        found[Keys.LLM.DENSE_FEAT_OUT_SIZE.format(arch="{arch}", dense=name)] = n_out
    return found


def _check_embedding(config: Config, d: Dims) -> None:
    _check(_with_defaults(config), d, family_layers=62)
    if config.values.get("use_bidirectional_attention") is not True:
        raise ModelError(f"{config.name}: use_bidirectional_attention must be true for embeddings")


EMBEDDING_GEMMA = replace(
    GEMMA3,
    architecture="gemma-embedding",
    names=("Gemma3TextModel",),
    rules={
        **GEMMA3.rules,
        "2_Dense.linear.weight": Rule(
            "dense_2.weight", lambda d: (d.more["dense"], d.n_embd), optional=True
        ),
        "3_Dense.linear.weight": Rule(
            "dense_3.weight", lambda d: (d.n_embd, d.more["dense"]), optional=True
        ),
    },
    metadata=_embedding,
    tensor_metadata=_dense_metadata,
    dims=_embedding_dims,
    roots=("model.", ""),
    head="none",
    check=_check_embedding,
)


GEMMA = Family(
    architecture="gemma",
    names=("GemmaForCausalLM",),
    rules={
        **blocks.embeddings(norm_plus=1.0),
        **blocks.pre_norms(plus=1.0),
        **blocks.attention(biases=False),
        **blocks.gated_mlp(),
    },
    metadata=blocks.rms_metadata,
    head="never",
    check=blocks.requires(
        hidden_activation=("gelu_pytorch_tanh", None), use_bidirectional_attention=False
    ),
)

FAMILIES = (GEMMA, GEMMA2, GEMMA3, GEMMA3_MULTIMODAL, EMBEDDING_GEMMA)
