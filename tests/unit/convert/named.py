"""Random checkpoints with published names and settings, for models that transformers saves in a
different form. Their largest dimensions are 64 to 288."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tests.unit.convert import files

Shape = tuple[int, ...]
N, V, FF, EXPERTS, HEAD = 64, 288, 96, 4, 64
SIZES: dict[str, Any] = {"vocab_size": V, "hidden_size": N, "intermediate_size": FF}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 256, "moe_intermediate_size": 32}
ENCODER: dict[str, Any] = {**SIZES, "num_hidden_layers": 2, "pad_token_id": 1}

DEEPSEEK_4: dict[str, Any] = {
    **SIZES,
    **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"},
    **{"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1},
    **{"num_key_value_heads": 1, "head_dim": HEAD, "q_lora_rank": 32, "qk_rope_head_dim": 16},
    **{"o_groups": 2, "o_lora_rank": 32, "n_routed_experts": EXPERTS, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    **{"scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "sliding_window": 16},
    **{"index_n_heads": 2, "index_head_dim": HEAD, "index_topk": 16, "rms_norm_eps": 1e-6},
    **{"compress_rope_theta": 160000.0, "rope_theta": 10000.0, "num_nextn_predict_layers": 0},
    **{"hc_mult": 4, "hc_sinkhorn_iters": 3, "hc_eps": 1e-6, "tie_word_embeddings": False},
}
del DEEPSEEK_4["intermediate_size"]  # It would apply to the experts.
STEP_3_5: dict[str, Any] = {
    **SIZES,
    **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_hidden_layers": 3},
    **{"num_attention_groups": 2, "head_dim": 16, "sliding_window": 8, "rms_norm_eps": 1e-5},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    **{"partial_rotary_factors": [0.5, 1.0, 0.5], "rope_theta": [10000.0, 5000.0, 10000.0]},
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        **{"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
    },
    **{
        "moe_num_experts": EXPERTS,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2",
    },
    **{"moe_router_scaling_factor": 1.5, "norm_expert_weight": True, "tie_word_embeddings": False},
    **{"moe_router_activation": "sigmoid", "use_moe_router_bias": True},
}
NOMIC_MOE: dict[str, Any] = {
    **ENCODER,  # Published ones omit transformers' defaults.
    **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert"},
    **{"n_embd": N, "n_layer": 2, "n_head": 4, "n_inner": FF, "n_positions": 2048},
    **{"max_trained_positions": 2048, "activation_function": "gelu", "causal": False},
    **{"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "prenorm": False},
    **{"rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None},
    **{"rotary_emb_base": 10000, "moe_every_n_layers": 2, "moe_top_k": 2, "num_experts": EXPERTS},
    **{"layer_norm_epsilon": 1e-5, "type_vocab_size": 1},
}
JINA_2: dict[str, Any] = {
    **ENCODER,
    **{"architectures": ["JinaBertForMaskedLM"], "model_type": "bert", "type_vocab_size": 2},
    **{"position_embedding_type": "alibi", "feed_forward_type": "geglu", "layer_norm_eps": 1e-12},
}
TASKS = ["retrieval.query", "text-matching"]
JINA_3: dict[str, Any] = {
    **ENCODER,
    **{"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "type_vocab_size": 1},
    **{"position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "layer_norm_eps": 1e-5},
    **{"lora_adaptations": TASKS, "lora_rank": 4, "lora_alpha": 1},
    "max_position_embeddings": 258,  # The two before the first position are unused.
    "task_instructions": dict.fromkeys(TASKS, "Represent: "),
}


def norm(name: str) -> dict[str, Shape]:
    return {f"{name}.weight": (N,), f"{name}.bias": (N,)}


def linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def deepseek_4() -> Iterator[tuple[str, Shape]]:
    yield from {"embed.weight": (V, N), "norm.weight": (N,), "head.weight": (V, N)}.items()
    yield from {"hc_head_fn": (4, 4 * N), "hc_head_base": (4,), "hc_head_scale": (1,)}.items()
    for i, ratio in enumerate(DEEPSEEK_4["compress_ratios"]):
        found: dict[str, Shape] = {"attn_norm.weight": (N,), "ffn_norm.weight": (N,)}
        found |= {
            "attn.attn_sink": (4,),
            "attn.q_norm.weight": (32,),
            "attn.kv_norm.weight": (HEAD,),
        }
        found |= {"attn.wq_a.weight": (32, N), "attn.wq_b.weight": (4 * HEAD, 32)}
        found |= {"attn.wkv.weight": (HEAD, N), "attn.wo_a.weight": (64, 2 * HEAD)}
        found |= {"attn.wo_b.weight": (N, 64), "ffn.gate.weight": (EXPERTS, N)}
        for part in ("attn", "ffn"):
            found |= {f"hc_{part}_fn": (24, 4 * N), f"hc_{part}_base": (24,)}
            found[f"hc_{part}_scale"] = (3,)
        compressors = {"attn.compressor": ratio, "attn.indexer.compressor": ratio == 4 and 4}
        for name, rate in compressors.items():
            wide = HEAD * (2 if rate == 4 else 1)
            if rate:
                found |= {f"{name}.{x}.weight": (wide, N) for x in ("wkv", "wgate")}
                found |= {f"{name}.ape": (rate, wide), f"{name}.norm.weight": (HEAD,)}
        if ratio == 4:
            found["attn.indexer.weights_proj.weight"] = (2, N)
            found["attn.indexer.wq_b.weight"] = (2 * HEAD, 32)
        is_hashed = i < DEEPSEEK_4["num_hash_layers"]
        found |= {"ffn.gate.tid2eid": (V, 2)} if is_hashed else {"ffn.gate.bias": (EXPERTS,)}
        for x, (rows, columns) in {"w1": (32, N), "w2": (N, 32), "w3": (32, N)}.items():
            found[f"ffn.shared_experts.{x}.weight"] = (rows, columns)
            for e in range(EXPERTS):  # Two 4-bit values per byte.
                found[f"ffn.experts.{e}.{x}.weight"] = (rows, columns // 2)
                found[f"ffn.experts.{e}.{x}.scale"] = (rows, columns // 32)
        yield from ((f"layers.{i}.{name}", shape) for name, shape in found.items())


def step_3_5() -> Iterator[tuple[str, Shape]]:
    yield from {"model.embed_tokens.weight": (V, N), "model.norm.weight": (N,)}.items()
    yield "lm_head.weight", (V, N)
    for i, heads in enumerate((4, 6, 4)):
        found: dict[str, Shape] = {
            f"{x}_layernorm.weight": (N,) for x in ("input", "post_attention")
        }
        found |= {f"self_attn.{x}_norm.weight": (16,) for x in "qk"}
        found |= {"self_attn.q_proj.weight": (16 * heads, N), "self_attn.g_proj.weight": (heads, N)}
        found |= {f"self_attn.{x}_proj.weight": (32, N) for x in "kv"}
        found["self_attn.o_proj.weight"] = (N, 16 * heads)
        for x, (rows, columns) in {"gate": (32, N), "up": (32, N), "down": (N, 32)}.items():
            if i:
                found[f"moe.{x}_proj.weight"] = (EXPERTS, rows, columns)
                found[f"share_expert.{x}_proj.weight"] = (rows, columns)
            else:
                wide = (N, FF) if x == "down" else (FF, N)
                found[f"mlp.{x}_proj.weight"] = wide
        found |= {"moe.gate.weight": (EXPERTS, N), "moe.router_bias": (EXPERTS,)} if i else {}
        yield from ((f"model.layers.{i}.{name}", shape) for name, shape in found.items())


def nomic_moe() -> Iterator[tuple[str, Shape]]:
    yield "embeddings.word_embeddings.weight", (V, N)
    yield "embeddings.token_type_embeddings.weight", (1, N)
    yield from norm("emb_ln").items()
    for i in range(2):
        found = linear("attn.Wqkv", 3 * N, N) | linear("attn.out_proj", N, N)
        found |= norm("norm1") | norm("norm2")
        if i % 2:
            found |= {f"mlp.experts.mlp.{x}": (EXPERTS * FF, N) for x in ("w1", "w2")}
            found |= {"mlp.experts.bias": (N,), "mlp.router.layer.weight": (EXPERTS, N)}
        else:
            found |= linear("mlp.fc1", FF, N) | linear("mlp.fc2", N, FF)
        yield from ((f"encoder.layers.{i}.{name}", shape) for name, shape in found.items())


def jina_2() -> Iterator[tuple[str, Shape]]:
    yield "embeddings.word_embeddings.weight", (V, N)
    yield "embeddings.token_type_embeddings.weight", (2, N)
    yield from norm("embeddings.LayerNorm").items()
    for i in range(2):
        found = linear("attention.output.dense", N, N) | linear("mlp.wo", N, FF)
        for x in ("query", "key", "value"):
            found |= linear(f"attention.self.{x}", N, N)
        found |= norm("attention.output.LayerNorm") | norm("mlp.layernorm")
        found["mlp.gated_layers.weight"] = (2 * FF, N)
        yield from ((f"encoder.layer.{i}.{name}", shape) for name, shape in found.items())


def jina_3() -> Iterator[tuple[str, Shape]]:
    """With matrices of adapters, which go into other files."""
    yield "roberta.embeddings.word_embeddings.parametrizations.weight.original", (V, N)
    yield "roberta.embeddings.token_type_embeddings.parametrizations.weight.original", (1, N)
    yield from norm("roberta.emb_ln").items()
    for i in range(2):
        found = norm("norm1") | norm("norm2")
        matrices = {"mixer.Wqkv": (3 * N, N), "mixer.out_proj": (N, N)}
        matrices |= {"mlp.fc1": (FF, N), "mlp.fc2": (N, FF)}
        for name, (rows, columns) in matrices.items():
            weight = f"{name}.parametrizations.weight"
            found |= {f"{weight}.original": (rows, columns), f"{name}.bias": (rows,)}
            found |= {f"{weight}.0.lora_A": (2, 4, columns), f"{weight}.0.lora_B": (2, rows, 4)}
        yield from ((f"roberta.encoder.layers.{i}.{name}", shape) for name, shape in found.items())


MODELS = {
    "deepseek-4": (DEEPSEEK_4, deepseek_4),
    "step-3.5": (STEP_3_5, step_3_5),
    "nomic-bert-moe": (NOMIC_MOE, nomic_moe),
    "jina-bert-v2": (JINA_2, jina_2),
    "jina-bert-v3": (JINA_3, jina_3),
}


def write(name: str, folder: Path) -> None:
    """Write the weights in BF16; DeepSeek's experts in four bits with scales, its tables as
    integers."""
    config, tensors = MODELS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(len(name))
    drawn = ((tensor, shape, *_values(tensor, shape, draw)) for tensor, shape in tensors())
    written = ((tensor, kind, shape, values) for tensor, shape, kind, values in drawn)
    files.write_tensors(folder / "model.safetensors", written)


def _values(name: str, shape: Shape, draw: np.random.Generator) -> tuple[str, bytes]:
    if name.endswith("tid2eid"):
        return "I64", draw.integers(0, EXPERTS, shape).astype("<i8").tobytes()
    if re.search(r"ffn\.experts\.\d+\.w\d\.weight", name):
        return "I8", draw.bytes(math.prod(shape))
    if name.endswith(".scale"):
        return "F8_E8M0", draw.integers(118, 122, shape).astype(np.uint8).tobytes()
    values = draw.standard_normal(shape, dtype=np.float32) / max(shape[-1], 4) ** 0.5
    if "norm" in name.lower() or "ln" in name:
        values += 1
    return "BF16", (values.view("<u4") >> 16).astype("<u2").tobytes()


def write_wordpiece(folder: Path) -> None:
    """Write a tokenizer like BERT's: letters, and letters inside a word."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(i) for i in range(33, 127) if not chr(i).isupper()]
    texts += [*letters, *(f"##{letter}" for letter in letters)]
    vocab = {text: i for i, text in enumerate(texts)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(texts[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings |= {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
