"""Llama 1-3.x, Mistral, Mixtral and the related SmolLM3 and Seed-OSS.

llama.cpp rotates neighbouring pairs in all but the last, so the rows of q and k are interleaved.
"""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks, experts
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config
from worker.errors import ModelError

DENSE = {
    **blocks.embeddings(),
    **blocks.pre_norms(),
    **blocks.attention(interleaved=True),
    **blocks.gated_mlp(biases=True),
}


def _check_smollm3(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu", use_sliding_window=False)
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
    metadata=experts.metadata,
    ignores_window=True,
    extra_tensors=blocks.llama3_factors,
    ignored=(r".*\.rotary_emb\.inv_freq",),
    check=blocks.requires(hidden_act="silu"),
)

MIXTRAL = replace(
    LLAMA,
    names=("MixtralForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(interleaved=True),
        **experts.router(f"{blocks.LAYER}.block_sparse_moe.gate.weight"),
        **experts.experts(f"{blocks.LAYER}.block_sparse_moe.experts", ("w1", "w3", "w2")),
    },
    dims=lambda config: experts.dims(config, "num_local_experts"),
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
    metadata=blocks.rms_metadata,
    check=_check_smollm3,
)

SEED_OSS = Family(
    architecture="seed_oss",
    names=("SeedOssForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.norms(input_layernorm="attn_norm", post_attention_layernorm="post_attention_norm"),
        **blocks.attention(),
        **blocks.gated_mlp(),
    },
    metadata=blocks.rms_metadata,
    check=blocks.requires(hidden_act="silu", attention_out_bias=False, mlp_bias=False),
)


def _mistral3(arch: str, config: Config, d: Dims) -> Metadata:
    found, rope = blocks.rms_metadata(arch, config, d), config.rope().params
    for key, name in (
        (Keys.Rope.SCALING_YARN_BETA_FAST, "beta_fast"),
        (Keys.Rope.SCALING_YARN_BETA_SLOW, "beta_slow"),
        (Keys.Attention.TEMPERATURE_SCALE, "llama_4_scaling_beta"),
    ):
        if rope.has(name):
            found[key] = rope.number(name)
    return found


def _check_mistral3(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="silu")
    if config.text("model_type", "mistral") not in ("mistral", "ministral3"):
        raise ModelError(
            f"{config.name}: model_type {config.values['model_type']!r} cannot be converted"
        )


MINISTRAL3 = Family(
    architecture="mistral3",
    names=("Ministral3ForCausalLM",),
    rules=DENSE,
    metadata=_mistral3,
    check=_check_mistral3,
)
"""Llama's blocks, with queries scaled by their position."""

MISTRAL3 = replace(
    MINISTRAL3,
    names=("Mistral3ForConditionalGeneration",),
    roots=("model.", "model.language_model.", "language_model.model."),
    section="text_config",
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
)
"""The vision tensors are left out."""

FAMILIES = (LLAMA, MIXTRAL, SMOLLM3, SEED_OSS, MINISTRAL3, MISTRAL3)
