"""Encoders, for embeddings and reranking: BERT, XLM-RoBERTa, nomic-bert and ModernBERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gguf.constants import Keys, PoolingType

from worker.convert.config import Config
from worker.convert.family.dims import GATED, Dims, renamed
from worker.convert.family.metadata import integer, layer_norm, require, sizes
from worker.convert.family.rules import Array, Family, From, Metadata, Sources
from worker.errors import ModelError


def _dims(config: Config) -> Dims:
    return replace(
        Dims.of(config),
        n_positions=config.integer("max_position_embeddings"),
        more={"position_offset": 0},
    )


def _roberta_dims(config: Config) -> Dims:
    """RoBERTa numbers positions from the padding token's id + 1; the rows before are not used."""
    d, offset = _dims(config), int(config.values.get("pad_token_id") or 0) + 1
    return replace(d, n_positions=d.n_positions - offset, more={"position_offset": offset})


def _positions(sources: Sequence[Array], d: Dims) -> Array:
    return sources[0][d.more["position_offset"] :]


def _common(_family: Family, _config: Config, d: Dims) -> Metadata:
    return {
        **sizes(d, d.n_positions),
        Keys.Attention.CAUSAL: False,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
    }


def _classifies(config: Config) -> bool:
    return "SequenceClassification" in str(config.values.get("architectures"))


def _bert(family: Family, config: Config, d: Dims) -> Metadata:
    found = _common(family, config, d) | layer_norm(config, "layer_norm_eps", default=1e-12)
    if _classifies(config):
        found[Keys.LLM.POOLING_TYPE] = int(PoolingType.RANK)
    return found


def _check_bert(config: Config, d: Dims) -> None:
    if _classifies(config) and len(config.section("id2label").values) > 1:
        raise ModelError(f"{config.name}: a classifier of several labels cannot be converted")


_EMBEDDINGS = "token_embd position_embd token_types token_embd_norm+"
_SOURCES: Sources = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": From("embeddings.position_embeddings.weight", make=_positions),
    "token_embd_norm": "embeddings.LayerNorm",
}

BERT = Family(
    "bert",
    ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    "attn_q+ attn_k+ attn_v+ attn_output+ attn_output_norm+ ffn_up+ ffn_down+ layer_output_norm+",
    model=f"{_EMBEDDINGS} cls.output? cls.output.bias?",
    layer="encoder.layer.{i}",
    sources={**_SOURCES, "cls.output": "classifier"},
    common=_bert,
    metadata={Keys.Tokenizer.TOKEN_TYPE_COUNT: integer("type_vocab_size", default=1)},
    dims=_dims,
    roots=("", "bert."),
    head="none",
    ignored=(r"(bert\.)?pooler\..*", r"(bert\.)?embeddings\.position_ids", r"cls\..*"),
    requires={"hidden_act": "gelu", "position_embedding_type": "absolute"},
    check=_check_bert,
)

XLM_ROBERTA = replace(
    BERT,
    names=(
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
        "RobertaModel",
        "RobertaForSequenceClassification",
    ),
    model=f"{_EMBEDDINGS} cls? cls.bias? cls.output? cls.output.bias?",
    sources={**_SOURCES, "cls": "classifier.dense", "cls.output": "classifier.out_proj"},
    dims=_roberta_dims,
    roots=("", "roberta."),
    ignored=(r"(roberta\.)?pooler\..*", r"(roberta\.)?embeddings\.position_ids", r"lm_head\..*"),
)


_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
"""The names of transformers for keys that the published checkpoints' own code names otherwise."""


def _nomic_config(config: Config) -> Config:
    trained = config.integer("max_trained_positions", default=2048)
    context = min(config.integer("n_positions", default=trained), trained)
    return renamed(config, _NOMIC_KEYS, max_position_embeddings=context)


def _nomic(family: Family, config: Config, d: Dims) -> Metadata:
    config = _nomic_config(config)
    return {
        **_common(family, config, d),
        **layer_norm(config, "layer_norm_eps", default=1e-12),
        Keys.Rope.FREQ_BASE: config.rope(default_theta=1000.0).theta,
    }


NOMIC_BERT = Family(
    "nomic-bert",
    ("NomicBertModel",),
    f"attn_qkv attn_output attn_output_norm+ {GATED} layer_output_norm+",
    model="token_embd token_types token_embd_norm+",
    layer="encoder.layers.{i}",
    sources={
        "token_embd": "embeddings.word_embeddings",
        "token_embd_norm": "emb_ln",
    },
    common=_nomic,
    metadata={Keys.Tokenizer.TOKEN_TYPE_COUNT: integer("type_vocab_size", default=2)},
    dims=lambda config: _dims(_nomic_config(config)),
    applies=lambda config: not config.values.get("moe_every_n_layers"),
    roots=("", "nomic_bert.", "bert."),
    head="none",
    ignored=(r"((nomic_)?bert\.)?pooler\..*", r"cls\..*"),
    requires={
        "hidden_act": "silu",
        "activation_function": "swiglu",
        "rotary_emb_fraction": 1.0,
        "prenorm": False,
        "causal": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "rotary_emb_interleaved": False,
    },
    ropes=("default",),
)


def _modern_bert(family: Family, config: Config, d: Dims) -> Metadata:
    local = config.rope("sliding_attention").theta
    if not config.has("rope_parameters"):
        local = config.number("local_rope_theta", default=10000.0)
    return {
        **_common(family, config, d),
        **layer_norm(config, "norm_eps"),
        Keys.Attention.SLIDING_WINDOW: config.integer("local_attention", default=128),
        Keys.Attention.SLIDING_WINDOW_PATTERN: config.integer(
            "global_attn_every_n_layers", default=3
        ),
        Keys.Rope.FREQ_BASE: config.rope(
            default_theta=config.number("global_rope_theta", default=160000.0)
        ).theta,
        Keys.Rope.FREQ_BASE_SWA: local,
        Keys.Rope.SCALING_TYPE: "none",
        Keys.Tokenizer.ADD_SEP: True,
    }


def _check_modern_bert(config: Config, d: Dims) -> None:
    period = config.integer("global_attn_every_n_layers", default=3)
    kinds = ["sliding_attention" if i % period else "full_attention" for i in range(d.n_layers)]
    require(config, d, {"layer_types": kinds})


MODERN_BERT = Family(
    "modern-bert",
    ("ModernBertModel", "ModernBertForMaskedLM"),
    # The first layer has no norm: its input is normed already.
    "attn_norm? attn_qkv attn_output ffn_norm ffn_up ffn_down",
    model="token_embd token_embd_norm output_norm",
    layer="layers.{i}",
    sources={
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
    },
    common=_modern_bert,
    dims=_dims,
    roots=("", "model."),
    head="none",
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*"),
    requires={
        "hidden_activation": "gelu",
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    check=_check_modern_bert,
)
