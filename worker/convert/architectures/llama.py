"""Llama 1-3.x, Mistral, Mixtral, Ministral 3: neighbouring dimensions are rotated together."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.layers import ATTENTION, EXPERTS, with_experts
from worker.convert.family.metadata import if_given, llama3_factors, require
from worker.convert.family.rules import Family, Setting
from worker.convert.family.sizes import Dims

DENSE = f"attn_norm {ATTENTION} ffn_norm ffn_gate~ ffn_up~ ffn_down~"

LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "InternLM3ForCausalLM"),
    DENSE,
    interleaved=True,
    ignores_window=True,
    scales_as_llama3=True,
    extra_tensors=llama3_factors,
    ignored=(r".*\.rotary_emb\.inv_freq",),
)

MIXTRAL = replace(
    LLAMA,
    names=("MixtralForCausalLM",),
    layers=f"attn_norm {ATTENTION} ffn_norm {EXPERTS}",
    sources={
        "ffn_gate_inp": ("block_sparse_moe.gate", "mlp.gate"),
        **{
            f"ffn_{name}_exps": f"block_sparse_moe.experts.{{e}}.{source}"
            for name, source in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    },
    dims=with_experts("num_local_experts", width="intermediate_size"),
)


def _in_rope(name: str) -> Setting:
    return lambda config, d: if_given(name)(config.rope().params, d)


def _check(config: Config, d: Dims) -> None:
    require(config, model_type=("mistral", "ministral3"))


MINISTRAL3 = Family(
    "mistral3",
    ("Ministral3ForCausalLM",),
    DENSE,
    multimodal=("Mistral3ForConditionalGeneration",),
    interleaved=True,
    metadata={  # Queries are scaled by their position.
        Keys.Rope.SCALING_YARN_BETA_FAST: _in_rope("beta_fast"),
        Keys.Rope.SCALING_YARN_BETA_SLOW: _in_rope("beta_slow"),
        Keys.Attention.TEMPERATURE_SCALE: _in_rope("llama_4_scaling_beta"),
    },
    check=_check,
)
