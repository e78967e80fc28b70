"""DeepSeek V2 to V3.2, Kimi K2.5, GLM 5, Mistral 4: attention over a compressed cache, dense first
layers, shared experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures.dense import in_rope, is_mistral4
from worker.convert.config import TRAINED, Config
from worker.convert.family.dims import Dims, with_experts
from worker.convert.family.metadata import as_deepseek, integer, of_dims
from worker.convert.family.rules import Array, Family, Into, Setting
from worker.errors import ModelError

_LITE_LAYERS = (26, 27)
"""The layer counts by which llama.cpp recognises models with uncompressed queries."""


def _dims(config: Config) -> Dims:
    extra = {
        "rope": config.integer("qk_rope_head_dim"),
        "nope": config.integer("qk_nope_head_dim"),
        "value": config.integer("v_head_dim"),
        "rank": config.integer("kv_lora_rank"),
        "q_rank": config.count("q_lora_rank"),
    }
    return replace(Dims.of(config), extra=extra)


def _halves(sources: Sequence[Array], d: Dims) -> Array:
    """`kv_b_proj` by head: in each, the rows for its keys precede those for its values."""
    return sources[0].reshape(d.n_head, d.extra["nope"] + d.extra["value"], d.extra["rank"])


def _keys(sources: Sequence[Array], d: Dims) -> Array:
    return _halves(sources, d)[:, : d.extra["nope"]].swapaxes(1, 2)


def _values(sources: Sequence[Array], d: Dims) -> Array:
    return _halves(sources, d)[:, d.extra["nope"] :]


def _log_mul(config: Config, _d: Dims) -> float | None:
    rope = config.rope()
    if rope.kind != "yarn":
        return None
    # llama.cpp divides by 0.1 again.
    return 0.1 * rope.params.number("mscale_all_dim", default=1.0)


def _if_grouped(key: str) -> Setting:
    return lambda config, d: config.integer(key) if config.count("n_group") > 1 else None


def _metadata(gating: int) -> Mapping[str, Setting]:
    """`gating` is that of `as_deepseek`."""
    return {
        Keys.Attention.HEAD_COUNT_KV: 1,  # All heads read one compressed cache.
        Keys.Attention.KEY_LENGTH: of_dims(lambda d: d.extra["rank"] + d.extra["rope"]),
        Keys.Attention.VALUE_LENGTH: of_dims(lambda d: d.extra["rank"]),
        Keys.Attention.KEY_LENGTH_MLA: of_dims(lambda d: d.extra["nope"] + d.extra["rope"]),
        Keys.Attention.VALUE_LENGTH_MLA: of_dims(lambda d: d.extra["value"]),
        Keys.Attention.KV_LORA_RANK: of_dims(lambda d: d.extra["rank"]),
        Keys.Attention.Q_LORA_RANK: of_dims(lambda d: d.extra["q_rank"] or None),
        Keys.LLM.EXPERT_GROUP_COUNT: _if_grouped("n_group"),
        Keys.LLM.EXPERT_GROUP_USED_COUNT: _if_grouped("topk_group"),
        Keys.Rope.DIMENSION_COUNT: of_dims(lambda d: d.extra["rope"]),
        Keys.Rope.SCALING_ATTN_FACTOR: None,
        Keys.Rope.SCALING_YARN_LOG_MUL: _log_mul,
        **as_deepseek(gating),
    }


def _check(config: Config, d: Dims) -> None:
    rope = config.rope()
    if rope.kind == "yarn" and rope.params.values.get("mscale") != rope.params.values.get(
        "mscale_all_dim"
    ):
        raise ModelError(f"{config.name}: mscale and mscale_all_dim must be equal for llama.cpp")
    if (not d.extra["q_rank"]) != (d.n_layers in _LITE_LAYERS):
        raise ModelError(
            f"{config.name}: q_lora_rank is {config.values.get('q_lora_rank')}, but llama.cpp's "
            f"deepseek2 has none in models of {_LITE_LAYERS} layers and one in all others"
        )


_REQUIRES = {
    "hidden_act": "silu",
    "attention_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}

DEEPSEEK_V2 = Family(
    "deepseek2",
    ("DeepseekV2ForCausalLM",),
    sources={
        "self_attn.kv_b_proj.weight": (Into("attn_k_b", make=_keys), Into("attn_v_b", make=_values))
    },
    metadata=_metadata(gating=1),
    dims=with_experts(
        "n_routed_experts", n_shared="n_shared_experts", n_dense="first_k_dense_replace", of=_dims
    ),
    ropes=("default", "yarn"),
    yarn={},
    requires={**_REQUIRES, "topk_method": ("greedy", "group_limited_greedy")},
    check=_check,
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    names=("DeepseekV3ForCausalLM",),
    multimodal=("KimiK25ForConditionalGeneration",),
    metadata=_metadata(gating=2),
    ignores_extra_layers=True,
    requires=_REQUIRES,
    needs="exp_probs_b.bias",
)

GLM4_MOE_LITE = replace(DEEPSEEK_V3, names=("Glm4MoeLiteForCausalLM",), multimodal=())

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    architecture="deepseek32",
    names=("DeepseekV32ForCausalLM",),
    tensors_of="glm-dsa",
    multimodal=(),
    metadata={
        **DEEPSEEK_V3.metadata,
        "{arch}.attention.indexer.head_count": integer("index_n_heads"),
        "{arch}.attention.indexer.key_length": integer("index_head_dim"),
        "{arch}.attention.indexer.top_k": integer("index_topk"),
    },
)


def _indexed(config: Config, d: Dims) -> list[bool]:
    """Which layers select tokens themselves; the others use the last such layer's selection."""
    kinds = config.items("indexer_types", list(config.values.get("index_topk_pattern") or ""))
    if kinds:
        return [kind in ("full", "F") for kind in kinds]
    period = config.integer("index_topk_freq", default=1)
    first = int(config.number("index_skip_topk_offset", default=2))
    return [max(i - first + 1, 0) % period == 0 for i in range(d.n_layers)]


GLM_DSA = replace(
    DEEPSEEK_V32,
    architecture="glm-dsa",
    tensors_of="",
    names=("GlmMoeDsaForCausalLM",),
    metadata={**DEEPSEEK_V32.metadata, "{arch}.attention.indexer.types": _indexed},
    needs="exp_probs_b.bias indexer.k_norm indexer.k_norm.bias indexer.proj indexer.attn_k "
    "indexer.attn_q_b",
)

MISTRAL4 = replace(
    DEEPSEEK_V2,
    architecture="mistral4",
    names=("Mistral4ForCausalLM",),
    multimodal=("Mistral3ForConditionalGeneration",),
    metadata={
        **DEEPSEEK_V2.metadata,
        Keys.Attention.TEMPERATURE_SCALE: in_rope("llama_4_scaling_beta"),
        Keys.Attention.TEMPERATURE_LENGTH: lambda config, d: config.rope().params.integer(TRAINED),
    },
    applies=is_mistral4,
)
