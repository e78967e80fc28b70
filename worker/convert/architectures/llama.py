"""Llama 1-3.x, Mistral, Mixtral and the related SmolLM3.

llama.cpp rotates neighbouring pairs in these families, so the rows of q and k are interleaved.
"""

from __future__ import annotations

from dataclasses import replace

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config
from worker.errors import ModelError

_OLD_BUFFERS = (r".*\.rotary_emb\.inv_freq",)
DENSE = {
    **blocks.embeddings(),
    **blocks.pre_norms(),
    **blocks.attention(interleaved=True),
    **blocks.gated_mlp(biases=True),
}


def _llama(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("llama", config, d) | blocks.rms_norm(config)


def _mixtral(config: Config, d: Dims) -> Metadata:
    return _llama(config, d) | experts.expert_metadata(config, d)


def _mixtral_dims(config: Config) -> Dims:
    d = Dims.of(config)
    return replace(d, n_expert=config.integer("num_local_experts"), n_ff_expert=d.n_ff)


def _smollm3(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("smollm3", config, d) | blocks.rms_norm(config)


def _check_silu(config: Config, d: Dims) -> None:
    blocks.require(config, "hidden_act", "silu")


def _check_smollm3(config: Config, d: Dims) -> None:
    _check_silu(config, d)
    blocks.require(config, "use_sliding_window", False)
    # llama.cpp skips the rotation in every fourth layer and has no setting for it.
    pattern = [int((i + 1) % 4 != 0) for i in range(d.n_layers)]
    if (config.values.get("no_rope_layers") or pattern) != pattern:
        raise ModelError(
            f"{config.name}: no_rope_layers must leave out every fourth layer, "
            "llama.cpp's smollm3 knows no other pattern"
        )


LLAMA = Family(
    architecture="llama",
    names=("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "InternLM3ForCausalLM"),
    rules=DENSE,
    metadata=_llama,
    ignores_window=True,
    extra_tensors=blocks.llama3_factors,
    ignored=_OLD_BUFFERS,
    check=_check_silu,
)

MIXTRAL = Family(
    architecture="llama",
    names=("MixtralForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(interleaved=True),
        **experts.router("model.layers.{i}.block_sparse_moe.gate.weight"),
        **experts.experts("model.layers.{i}.block_sparse_moe.experts", "w1", "w3", "w2"),
    },
    metadata=_mixtral,
    ignores_window=True,
    dims=_mixtral_dims,
    extra_tensors=blocks.llama3_factors,
    ignored=_OLD_BUFFERS,
    check=_check_silu,
)

SMOLLM3 = Family(
    architecture="smollm3",
    names=("SmolLM3ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(interleaved=True),
        **blocks.gated_mlp(),
    },
    metadata=_smollm3,
    check=_check_smollm3,
)

FAMILIES = (LLAMA, MIXTRAL, SMOLLM3)
