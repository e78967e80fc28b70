"""Llama 1-3.x, Mistral and Mixtral: one architecture to llama.cpp."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.config import Config


def _metadata(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("llama", config, d) | blocks.rms_norm("llama", config)


LLAMA = Family(
    architecture="llama",
    names=("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM"),
    rules={
        **blocks.embeddings(),
        **blocks.pre_norms(),
        **blocks.attention(interleaved=True),
        **blocks.gated_mlp(biases=True),
    },
    metadata=_metadata,
    extra_tensors=blocks.llama3_factors,
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)
