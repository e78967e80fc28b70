"""The small random models of `tests/data/parity`: configuration, settings and stored type."""

from __future__ import annotations

from typing import Any

from tools.reference.parity_settings import (
    EXPERTS,
    INDEXER,
    INTERNLM_3,
    LATENT,
    LINEAR,
    LLAMA3_ROPE,
    LOCAL_EXPERTS,
    LONG_ROPE,
    MINISTRAL_ROPE,
    N_VOCAB,
    NEMOTRON_H,
    PHI_4_MINI,
    QWEN2_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN_YARN,
    SPARSE,
    YARN,
)

# Folder: (configuration class, settings beyond COMMON).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-3.1": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-biases": (
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            "stored": "float16",
        },
    ),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": None}),
    "mixtral": ("MixtralConfig", LOCAL_EXPERTS),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "gemma-2": ("Gemma2Config", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}),
    "gemma-3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi-3": ("Phi3Config", {}),
    "phi-3-short": (
        "Phi3Config",
        {
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 512},
            "original_max_position_embeddings": 512,
            "max_position_embeddings": 1024,
            "num_hidden_layers": 1,
        },
    ),
    "phi-3-long": (
        "Phi3Config",
        {
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 16},
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "num_hidden_layers": 1,
        },
    ),
    "olmo-2": ("Olmo2Config", {}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm-12b": ("StableLmConfig", {"qk_layernorm": True, "use_parallel_residual": True}),
    "gpt-2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "smollm-3": ("SmolLM3Config", {"num_hidden_layers": 4, "intermediate_size": 64}),
    "qwen3-yarn": ("Qwen3Config", QWEN_YARN),
    "gemma": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "olmo-3": (
        "Olmo3Config",
        {"num_hidden_layers": 4, "sliding_window": 8, "intermediate_size": 64},
    ),
    "command-r": ("CohereConfig", {"logit_scale": 0.25}),
    "cohere-2": (
        "Cohere2Config",
        {"num_hidden_layers": 4, "sliding_window": 8, "intermediate_size": 64, "logit_scale": 0.25},
    ),
    "glm-4": ("Glm4Config", {"head_dim": 32, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "exaone-4": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "nemotron": ("NemotronConfig", {"hidden_act": "relu2"}),
    "starcoder-2": (
        "Starcoder2Config",
        {"sliding_window": None, "use_bias": True, "tie_word_embeddings": True},
    ),
    "seed-oss": (
        "SeedOssConfig",
        {"head_dim": 32, "attention_bias": True, "attention_out_bias": False},
    ),
    "olmo": ("OlmoConfig", {"clip_qkv": 8.0}),
    "phi-2": ("PhiConfig", {"num_key_value_heads": 4}),
    "ministral-3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "sliding_window": None,
            "rope_parameters": {**MINISTRAL_ROPE},
        },
    ),
    "bert": ("BertConfig", {"num_key_value_heads": 4, "pooling": "mean"}),
    "xlm-roberta": (
        "XLMRobertaConfig",
        {"num_key_value_heads": 4, "type_vocab_size": 1, "pad_token_id": 1, "pooling": "cls"},
    ),
    "modern-bert": (
        "ModernBertConfig",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
            "local_attention": 8,
            "pooling": "mean",
        },
    ),
    "qwen3-embedding": ("Qwen3Config", {"head_dim": 32, "pooling": "lasttoken"}),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "sliding_window": 8,
            "rope_parameters": YARN,
        },
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        LOCAL_EXPERTS
        | {"attention_multiplier": 0.3, "embedding_multiplier": 1.5, "logits_scaling": 2.0},
    ),
    "granite-moe-shared": (
        "GraniteMoeSharedConfig",
        LOCAL_EXPERTS | {"shared_intermediate_size": 48, "attention_multiplier": 0.25},
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
        | {"num_key_value_heads": 4},
    ),
    "glm-4-moe": (
        "Glm4MoeConfig",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 32}
        | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5}
        | {"partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v2": ("DeepseekV2Config", LATENT),
    "deepseek-v3": (
        "DeepseekV3Config",
        LATENT | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "ernie-4.5": ("Ernie4_5Config", {"head_dim": 32}),
    "lfm-2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "mistral-4": (
        "Mistral4Config",
        LATENT | {"first_k_dense_replace": 0, "rope_parameters": MINISTRAL_ROPE},
    ),
    "llama-4": (
        "Llama4TextConfig",
        {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
        | {"intermediate_size": 32, "intermediate_size_mlp": 48, "head_dim": 16}
        | {"interleave_moe_layer_step": 2},
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {"num_hidden_layers": 4, "head_dim": 32, "shared_expert_intermediate_size": 32}
        | EXPERTS
        | LINEAR,
    ),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        {"num_hidden_layers": 4, "head_dim": 32, "intermediate_size": 48} | LINEAR,
    ),
    "deepseek-v3.2": ("DeepseekV32Config", LATENT | INDEXER),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"intermediate_size": 32, "shared_intermediate_size": 48, "mamba_n_heads": 4}
        | {"mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
        | {"position_embedding_type": "nope", "attention_multiplier": 0.25},
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {"num_hidden_layers": 4, "head_dim": 32, "shared_expert_intermediate_size": 32}
        | EXPERTS
        | LINEAR,
    ),
    "gemma-4": (
        "Gemma4TextConfig",
        {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": N_VOCAB}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "intermediate_size": 32}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"final_logit_softcapping": 30.0},
    ),
    "nemotron-h": ("NemotronHConfig", NEMOTRON_H),
    "nemotron-h-dense": (
        "NemotronHConfig",
        {**NEMOTRON_H, "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    ),
    "ernie-4.5-moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
        | {"moe_num_shared_experts": 2, "head_dim": 16},
    ),
    "lfm-2-moe": (
        "Lfm2MoeConfig",
        EXPERTS
        | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
        | {"num_dense_layers": 1, "intermediate_size": 48},
    ),
    "nomic-bert": ("NomicBertConfig", {"num_key_value_heads": 4, "pooling": "mean"}),
    "embedding-gemma": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "intermediate_size": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_bidirectional_attention": True,
            "pooling": "mean",
            "dense": True,
        },
    ),
    "gemma-4-moe": (
        "Gemma4TextConfig",
        {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "intermediate_size": 48}
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
        | {"final_logit_softcapping": 30.0},
    ),
    "glm-dsa": ("GlmMoeDsaConfig", LATENT | INDEXER),
    "qwen3-vl-moe": ("Qwen3VLMoeConfig", QWEN3_VL_MOE),
    "internlm-3": ("InternLM3Config", INTERNLM_3),
    "phi-4-mini": ("Phi3Config", PHI_4_MINI),
    "arcee": ("ArceeConfig", {}),
    "minimax-m2": (
        "MiniMaxM2Config",
        LOCAL_EXPERTS
        | {"head_dim": 32}
        | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "glm-4-moe-lite": (
        "Glm4MoeLiteConfig",
        LATENT | {"mlp_layer_types": ["dense", "sparse"], "routed_scaling_factor": 1.8},
    ),
    "qwen2-vl": ("Qwen2VLConfig", QWEN2_VL),
    "qwen3-vl": ("Qwen3VLConfig", QWEN3_VL),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "hunyuan-moe": (
        "HunYuanMoEV1Config",
        {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
    ),
    "jais-2": ("Jais2Config", {"hidden_act": "relu2"}),
    "dots-1": (
        "Dots1Config",
        SPARSE
        | {"head_dim": 16, "num_key_value_heads": 4, "norm_topk_prob": True}
        | {"sliding_window": None},
    ),
    "exaone-moe": (
        "ExaoneMoeConfig",
        EXPERTS
        | {"num_hidden_layers": 4, "sliding_window": 8, "num_shared_experts": 1}
        | {"head_dim": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    ),
    "solar-open": ("SolarOpenConfig", SPARSE | {"head_dim": 16, "first_k_dense_replace": 0}),
    "bert-ranker": ("BertConfig", {"num_key_value_heads": 4, "num_labels": 1, "ranks": True}),
    "xlm-roberta-ranker": (
        "XLMRobertaConfig",
        {"num_key_value_heads": 4, "type_vocab_size": 1, "pad_token_id": 1}
        | {"num_labels": 1, "ranks": True},
    ),
    "granite-4": (
        "GraniteMoeHybridConfig",
        {
            "layer_types": ["attention", "attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"intermediate_size": 48, "shared_intermediate_size": 48, "mamba_n_heads": 4}
        | {"mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
        | {"position_embedding_type": "rope", "attention_multiplier": 0.25},
    ),
    "hunyuan-long": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
            | {"rope_theta": 10000.0},
        },
    ),
    "gte-qwen2": (
        "Qwen2Config",
        {"is_causal": False, "pooling": "lasttoken", "saved_as": "Qwen2ForCausalLM"},
    ),
}
"""Add new ones at the end, because the position is the seed. `pooling` makes an embedding model,
`dense` adds two matrices after it, `ranks` makes a ranking model; `saved_as` is the name in
published configurations of an architecture that transformers has under another name; `stored` is
the type of the weights if it is not bfloat16."""
