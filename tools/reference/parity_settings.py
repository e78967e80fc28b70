"""Settings that several of the small random models of `parity_models` share."""

from __future__ import annotations

from typing import Any

N_VOCAB = 288
COMMON = {
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 64}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN_YARN = {"rope_parameters": YARN, "head_dim": 32, "num_hidden_layers": 1}
MINISTRAL_ROPE = {
    **YARN,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LATENT = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT |= {"first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4}
LATENT |= {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 16, "v_head_dim": 24, "n_group": 1, "topk_group": 1}
SPARSE: dict[str, Any] = {key: LATENT[key] for key in list(LATENT)[:5]}
SPARSE |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}
INDEXER = {"index_n_heads": 2, "index_head_dim": 128, "index_topk": 64}
NEMOTRON_H = {**LATENT, "layers_block_type": ["mamba", "moe", "attention", "moe"]}
NEMOTRON_H |= {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
NEMOTRON_H |= {"head_dim": 16, "chunk_size": 8, "moe_shared_expert_intermediate_size": 48}
INTERNLM_3: dict[str, Any] = {"head_dim": 16, "attention_bias": True, "mlp_bias": True}
INTERNLM_3 |= {"rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50000.0}}
INTERNLM_3 |= {"saved_as": "InternLM3ForCausalLM"}
PHI_4_MINI: dict[str, Any] = {
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}
PHI_4_MINI |= {"original_max_position_embeddings": 16}
PHI_4_MINI["rope_parameters"] = {
    **LONG_ROPE,
    "long_factor": LONG_ROPE["long_factor"][:6],
    "short_factor": LONG_ROPE["short_factor"][:6],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
_VL: dict[str, Any] = {**COMMON, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
QWEN2_VL: dict[str, Any] = {
    "text_config": _VL,
    "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
}
QWEN2_VL["text_config"]["rope_parameters"]["mrope_section"] = [4, 2, 2]
QWEN3_VL: dict[str, Any] = {
    # Sections for which llama.cpp rotates every frequency.
    "text_config": {
        **_VL,
        "head_dim": 16,
        "rope_parameters": {**_VL["rope_parameters"], "mrope_section": [3, 3, 2]},
    },
    "vision_config": {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2}
    | {"intermediate_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
QWEN3_VL_MOE: dict[str, Any] = {
    **QWEN3_VL,
    "text_config": {
        **{**QWEN3_VL["text_config"], **EXPERTS},
        **{"norm_topk_prob": True, "moe_intermediate_size": 48},
    },
}
# llama.cpp looks up GELU in a half-precision table; small activations hide the difference.
GAIN = {
    "GPT2Config": 0.2,
    "GemmaConfig": 0.9,
    "Gemma4TextConfig": 0.9,
    "Gemma2Config": 0.9,
    "Gemma3TextConfig": 0.9,
}
