"""Encoders, for embeddings and reranking: BERT, XLM-RoBERTa, nomic-bert and ModernBERT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gguf.constants import Keys, PoolingType

from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import integer, local_theta, number, require, sizes
from worker.convert.family.rules import QKV_BIASES, Array, Family, Metadata
from worker.errors import ModelError

_OTHER_HEAD = "they are for another task"
_HEAD = (("pooler.dense", "cls"), ("classifier", "cls.output"))
"""The two layers of BERT's ranking head, with their names in the GGUF."""
_PARTS = ("weight", "bias")


def _roberta_dims(config: Config) -> Dims:
    """RoBERTa numbers positions from the padding token's id + 1; the rows before are not used."""
    has_none = config.values.get("pad_token_id") == -1
    unused = 0 if has_none else config.count("pad_token_id") + 1
    return replace(Dims.of(config), extra={"unused": unused})


def _positions(sources: Sequence[Array], d: Dims) -> Array:
    return sources[0][d.extra["unused"] :]


def _encoder(_family: Family, config: Config, d: Dims) -> Metadata:
    n_positions = config.integer("max_position_embeddings") - d.extra.get("unused", 0)
    common: Metadata = {Keys.Attention.CAUSAL: False, Keys.LLM.VOCAB_SIZE: d.n_vocab}
    return sizes(d, n_positions) | common


BERT = Family(
    "bert",
    ("BertModel", "BertForMaskedLM"),
    common=_encoder,
    metadata={
        Keys.Attention.LAYERNORM_EPS: number("layer_norm_eps", default=1e-12),
        Keys.Tokenizer.TOKEN_TYPE_COUNT: integer("type_vocab_size", default=1),
    },
    head="none",
    ignored={r"(pooler|cls)\..*": _OTHER_HEAD},
    requires={"hidden_act": "gelu", "position_embedding_type": "absolute"},
    needs=f"token_types {QKV_BIASES} attn_output.bias ffn_up.bias ffn_down.bias",
)

XLM_ROBERTA = replace(
    BERT,
    names=("XLMRobertaModel", "RobertaModel"),
    makes={"position_embd": _positions},
    # Not jina-embeddings-v3, which has adapters and rotary positions.
    applies=lambda config: not config.has("lora_adaptations"),
    dims=_roberta_dims,
    ignored={r"(pooler|lm_head)\..*": _OTHER_HEAD},
)


def _one_label(sources: Sequence[Array], _d: Dims) -> Array:
    if (n := len(sources[0])) != 1:
        raise ModelError(f"a classifier of {n} labels cannot be converted")
    return sources[0]


def _ranker(family: Family, *names: str) -> Family:
    """The family with a head of two layers, of which the first ends in a tanh."""
    return replace(
        family,
        names=names,
        makes={**family.makes, "cls.output": _one_label, "cls.output.bias": _one_label},
        metadata={**family.metadata, Keys.LLM.POOLING_TYPE: int(PoolingType.RANK)},
        needs=f"{family.needs} cls cls.bias cls.output cls.output.bias",
    )


def _one_type(config: Config) -> Iterator[str]:
    if config.integer("type_vocab_size", default=1) > 1:
        yield (
            "llama.cpp gives all tokens the first text's type; the model has another for the second"
        )


XLM_ROBERTA_RANKER = _ranker(
    XLM_ROBERTA, "XLMRobertaForSequenceClassification", "RobertaForSequenceClassification"
)
BERT_RANKER = replace(
    _ranker(BERT, "BertForSequenceClassification"),
    sources={f"{name}.{part}": f"{target}.{part}" for name, target in _HEAD for part in _PARTS},
    notes=_one_type,
    ignored={r"cls\..*": _OTHER_HEAD},
)

_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
"""transformers' names of keys, with those in the published checkpoints' own code."""


def _nomic_config(config: Config) -> Config:
    trained = config.integer("max_trained_positions", default=2048)
    n_positions = config.integer("n_positions", "max_position_embeddings", default=trained)
    config = config.renamed(_NOMIC_KEYS)
    return config.changed(max_position_embeddings=min(n_positions, trained))


NOMIC_BERT = Family(
    "nomic-bert",
    ("NomicBertModel",),
    common=_encoder,
    metadata={
        Keys.Attention.LAYERNORM_EPS: number("layer_norm_eps", default=1e-12),
        Keys.Rope.FREQ_BASE: lambda config, d: config.rope(default_theta=1000.0).theta,
        Keys.Tokenizer.TOKEN_TYPE_COUNT: integer("type_vocab_size", default=2),
    },
    config=_nomic_config,
    applies=lambda config: not config.values.get("moe_every_n_layers"),
    head="none",
    ignored={r"(pooler|cls)\..*": _OTHER_HEAD},
    requires={
        "hidden_act": "silu",
        "activation_function": "swiglu",
        "rotary_emb_fraction": 1.0,
        **dict.fromkeys(("prenorm", "causal", "rotary_emb_interleaved"), False),
        **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias"), False),
    },
    ropes=("default",),
    needs="token_types",
)


def _global_theta(config: Config, _d: Dims) -> float:
    default = config.number("global_rope_theta", default=160000.0)
    return config.rope(default_theta=default).theta


def _check_modern_bert(config: Config, d: Dims) -> None:
    period = config.integer("global_attn_every_n_layers", default=3)
    kinds = ["sliding_attention" if i % period else "full_attention" for i in range(d.n_layers)]
    require(config, d, {"layer_types": kinds})


def _modern_dims(config: Config) -> Dims:
    """The first layer lacks the norm before attention: its input is already normalised."""
    d = Dims.of(config)
    return replace(d, kinds=("first", *("other",) * (d.n_layers - 1)))


MODERN_BERT = Family(
    "modern-bert",
    ("ModernBertModel", "ModernBertForMaskedLM"),
    common=_encoder,
    metadata={
        Keys.Attention.LAYERNORM_EPS: number("norm_eps", default=1e-5),
        Keys.Attention.SLIDING_WINDOW: integer("local_attention", default=128),
        Keys.Attention.SLIDING_WINDOW_PATTERN: integer("global_attn_every_n_layers", default=3),
        Keys.Rope.FREQ_BASE: _global_theta,
        Keys.Rope.FREQ_BASE_SWA: local_theta("local_rope_theta"),
        Keys.Rope.SCALING_TYPE: "none",
    },
    head="none",
    dims=_modern_dims,
    ignored={r"(head|decoder|classifier)\..*": _OTHER_HEAD},
    requires={
        "hidden_activation": "gelu",
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), False),
    },
    check=_check_modern_bert,
)
