"""What a key means that `config.json` leaves out, where it is not what most families mean.

A checkpoint may leave out whatever its class in transformers has by default, and that is another
value in another class. Here are those by `model_type`; `tests/unit/convert/test_defaults.py` takes
each key out of each checkpoint and compares. An explicit `null` is not absence: it says that there
is no window, or that the heads are as many as usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from worker.convert.config import Config
from worker.errors import ModelError

GIVEN: Final = object()
"""In place of a value: the key must be there. Releases of transformers, or a model's own code, have
different defaults, or the default is a whole scaling of the rotation."""

_TIED = {"tie_word_embeddings": True}
_SCALED = {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
_DEEPSEEK3 = {"n_group": 8, "topk_group": 4, **_SCALED}
_ERNIE = {**_TIED, "rope_theta": 500000.0}
_LFM2 = {**_TIED, "rope_theta": 1000000.0, "num_key_value_heads": 8}
_QWEN2_VL = {"num_key_value_heads": 8, "rope_theta": 1000000.0}
_ROBERTA = {"pad_token_id": 1, "type_vocab_size": 2}
_SHARED_512 = {"shared_expert_intermediate_size": 512}

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bert": {"type_vocab_size": 2},
    "cohere": {**_TIED, "rope_theta": GIVEN},
    "cohere2": {**_TIED, "sliding_window": 4096},
    "deepseek_v3": _DEEPSEEK3,
    "deepseek_v32": {**_DEEPSEEK3, "first_k_dense_replace": 3},
    "dots1": {"num_key_value_heads": 32},
    "ernie4_5": {**_ERNIE, "head_dim": 128, "num_key_value_heads": 2},
    "ernie4_5_moe": _ERNIE,
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096},
    "exaone_moe": {"num_key_value_heads": 32, "sliding_window": 4096, **_SCALED},
    "gemma": {**_TIED, "head_dim": 256, "num_key_value_heads": 16},
    "gemma2": {**_TIED, "query_pre_attn_scalar": 256},
    "gemma3": {
        **_TIED,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
        "rope_theta": 1_000_000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma4": {**_TIED, "head_dim": 256, "hidden_size_per_layer_input": 256, "sliding_window": 512},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2},
    "glm4_moe": {
        "attention_bias": False,
        "use_qk_norm": False,
        "norm_topk_prob": True,
        "num_key_value_heads": 8,
    },
    "glm4_moe_lite": {"norm_topk_prob": True, "routed_scaling_factor": 1.8},
    "glm_moe_dsa": {"first_k_dense_replace": 3, **_SCALED},
    "gpt2": _TIED,
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rope_type": GIVEN,
        "sliding_window": 128,
    },
    "granitemoe": {"num_local_experts": 8},
    "granitemoeshared": {"num_local_experts": 8},
    "internlm3": {"head_dim": 128, "num_key_value_heads": 2},
    "kimi_k2": _DEEPSEEK3,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "llama": {"attention_bias": False, "mlp_bias": False},
    "llama4": {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 500000.0},
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": GIVEN},
    "ministral3": {"head_dim": 128, "num_key_value_heads": 8, "rope_type": GIVEN},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mistral4": {"norm_topk_prob": True, "rope_type": GIVEN},
    "mixtral": {"num_key_value_heads": 8, "rope_theta": 1000000.0},
    "olmo3": {"rope_theta": GIVEN, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_moe": {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
    "qwen2_vl": _QWEN2_VL,
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_5": {"head_dim": 256},
    "qwen3_5_moe": {**_SHARED_512, "head_dim": 256, "num_key_value_heads": 2},
    "qwen3_next": {**_SHARED_512, "head_dim": 256, "num_key_value_heads": 2},
    "qwen3_vl": {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": GIVEN},
    "qwen3_vl_moe": {"num_key_value_heads": 16, "rope_theta": GIVEN},
    "roberta": _ROBERTA,
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {**_TIED, "rope_theta": 2000000.0},
    "solar_open": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
    },
    "stablelm": {"num_key_value_heads": 32, "qk_layernorm": False, "use_qkv_bias": False},
    "starcoder2": {**_TIED, "num_key_value_heads": 2},
    "xlm-roberta": _ROBERTA,
}
"""By `model_type`, without the `_text` that a part of a multimodal model may have behind it."""


def completed(config: Config, kind: str) -> Config:
    """With the defaults of a `model_type` in the places of keys that are absent.

    Raises:
        ModelError: a key is absent that has no default.
    """
    there = set(_keys(config))
    defaults = DEFAULTS.get(kind.removesuffix("_text"), {})
    for key, value in defaults.items():
        if value is GIVEN and key not in there:
            raise ModelError(f"{config.name} lacks {key}")
    missing = {key: value for key, value in defaults.items() if value is not GIVEN}
    return Config({**missing, **config.values}, config.name)


def _keys(config: Config) -> Iterator[str]:
    """The keys that are there, also those of the rotation, which may be one or two levels deeper
    and have an older name for its type."""
    yield from config.values
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.section(name).values
        for params in (rope, *(each for each in rope.values() if isinstance(each, dict))):
            yield from ("rope_type" if key == "type" else key for key in params)
