"""Encoders, for embeddings and reranking: BERT, XLM-RoBERTa, nomic-bert and ModernBERT."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys, PoolingType

from worker.convert.architectures import blocks, shapes
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules
from worker.convert.config import Config
from worker.errors import ModelError

_LAYER = "encoder.layer.{i}"


def _bert_dims(config: Config) -> Dims:
    d = Dims.of(config)
    return replace(d, n_positions=config.integer("max_position_embeddings"))


def _roberta_dims(config: Config) -> Dims:
    """RoBERTa numbers positions from the padding token's id + 1; the rows before are not used."""
    offset = int(config.values.get("pad_token_id") or 0) + 1
    positions = config.integer("max_position_embeddings") - offset
    return replace(Dims.of(config), n_positions=positions, more={"position_offset": offset})


def _metadata(d: Dims) -> Metadata:
    return {
        **blocks.sizes(d, d.n_positions),
        Keys.Attention.CAUSAL: False,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
    }


def _bert(_arch: str, config: Config, d: Dims) -> Metadata:
    found: Metadata = {
        **_metadata(d),
        **blocks.layer_norm_epsilon(config, "layer_norm_eps", default=1e-12),
        Keys.Tokenizer.TOKEN_TYPE_COUNT: config.integer("type_vocab_size", default=1),
    }
    if "SequenceClassification" in str(config.values.get("architectures")):
        found[Keys.LLM.POOLING_TYPE] = int(PoolingType.RANK)
    return found


def _check_bert(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_act="gelu", position_embedding_type="absolute")
    if "SequenceClassification" in str(config.values.get("architectures")):
        if len(config.section("id2label").values) > 1:
            raise ModelError(f"{config.name}: a classifier of several labels cannot be converted")


def _bert_rules() -> Rules:
    attention = f"{_LAYER}.attention"
    return {
        "embeddings.word_embeddings.weight": Rule("token_embd.weight", shapes.by_token),
        "embeddings.position_embeddings.weight": Rule(
            "position_embd.weight",
            lambda d: (d.n_positions, d.n_embd),
            rows=lambda d: (d.more.get("position_offset", 0), d.n_positions),
            keep_f32=True,
        ),
        "embeddings.token_type_embeddings.weight": Rule(
            "token_types.weight", lambda d: (d.more["n_types"], d.n_embd), keep_f32=True
        ),
        **blocks.layer_norm("embeddings.LayerNorm", "token_embd_norm"),
        **blocks.linear(f"{attention}.self.query", "blk.{i}.attn_q", shapes.square),
        **blocks.linear(f"{attention}.self.key", "blk.{i}.attn_k", shapes.square),
        **blocks.linear(f"{attention}.self.value", "blk.{i}.attn_v", shapes.square),
        **blocks.linear(f"{attention}.output.dense", "blk.{i}.attn_output", shapes.square),
        **blocks.layer_norm(f"{attention}.output.LayerNorm", "blk.{i}.attn_output_norm"),
        **blocks.linear(f"{_LAYER}.intermediate.dense", "blk.{i}.ffn_up", shapes.up),
        **blocks.linear(f"{_LAYER}.output.dense", "blk.{i}.ffn_down", shapes.down),
        **blocks.layer_norm(f"{_LAYER}.output.LayerNorm", "blk.{i}.layer_output_norm"),
    }


def _with_types(dims: Dims, config: Config) -> Dims:
    n_types = config.integer("type_vocab_size", default=1)
    return replace(dims, more={**dims.more, "n_types": n_types})


BERT = Family(
    architecture="bert",
    names=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    rules={
        **_bert_rules(),
        "classifier.weight": Rule("cls.output.weight", lambda d: (1, d.n_embd), optional=True),
        "classifier.bias": Rule("cls.output.bias", lambda d: (1,), optional=True),
    },
    metadata=_bert,
    dims=lambda config: _with_types(_bert_dims(config), config),
    roots=("", "bert."),
    head="none",
    ignored=(r"(bert\.)?pooler\..*", r"(bert\.)?embeddings\.position_ids", r"cls\..*"),
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
    rules={
        **_bert_rules(),
        "classifier.dense.weight": Rule("cls.weight", shapes.square, optional=True),
        "classifier.dense.bias": Rule("cls.bias", shapes.vector, optional=True),
        "classifier.out_proj.weight": Rule(
            "cls.output.weight", lambda d: (1, d.n_embd), optional=True
        ),
        "classifier.out_proj.bias": Rule("cls.output.bias", lambda d: (1,), optional=True),
    },
    dims=lambda config: _with_types(_roberta_dims(config), config),
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
    own = {key: config.values.get(old) for key, old in _NOMIC_KEYS.items()}
    trained = config.integer("max_trained_positions", default=2048)
    own["max_position_embeddings"] = min(config.integer("n_positions", default=trained), trained)
    present = {key: value for key, value in config.values.items() if value is not None}
    return Config({**own, **present}, config.name)


def _nomic(_arch: str, config: Config, d: Dims) -> Metadata:
    config = _nomic_config(config)
    return {
        **_metadata(d),
        **blocks.layer_norm_epsilon(config, "layer_norm_eps", default=1e-12),
        Keys.Rope.FREQ_BASE: config.rope(default_theta=1000.0).theta,
        Keys.Tokenizer.TOKEN_TYPE_COUNT: config.integer("type_vocab_size", default=2),
    }


def _check_nomic(config: Config, d: Dims) -> None:
    blocks.require_default_rope(config)
    blocks.require(config, hidden_act="silu", activation_function="swiglu")
    blocks.require(config, rotary_emb_fraction=1.0, moe_every_n_layers=0)
    blocks.require(config, prenorm=False, causal=False, qkv_proj_bias=False, mlp_fc1_bias=False)
    blocks.require(config, rotary_emb_interleaved=False)


_NOMIC_LAYER = "encoder.layers.{i}"
NOMIC_BERT = Family(
    architecture="nomic-bert",
    names=("NomicBertModel",),
    rules={
        "embeddings.word_embeddings.weight": Rule("token_embd.weight", shapes.by_token),
        "embeddings.token_type_embeddings.weight": Rule(
            "token_types.weight", lambda d: (d.more["n_types"], d.n_embd), keep_f32=True
        ),
        **blocks.layer_norm("emb_ln", "token_embd_norm"),
        **blocks.weights(
            f"{_NOMIC_LAYER}.attn",
            {
                "Wqkv": ("attn_qkv", shapes.three_squares),
                "out_proj": ("attn_output", shapes.square),
            },
        ),
        **blocks.layer_norm(f"{_NOMIC_LAYER}.norm1", "blk.{i}.attn_output_norm"),
        **blocks.gated_mlp(f"{_NOMIC_LAYER}.mlp", ("fc12", "fc11", "fc2")),
        **blocks.layer_norm(f"{_NOMIC_LAYER}.norm2", "blk.{i}.layer_output_norm"),
    },
    metadata=_nomic,
    dims=lambda config: _with_types(_bert_dims(_nomic_config(config)), config),
    roots=("", "nomic_bert.", "bert."),
    head="none",
    ignored=(r"((nomic_)?bert\.)?pooler\..*", r"cls\..*"),
    check=_check_nomic,
)


def _modern_bert(_arch: str, config: Config, d: Dims) -> Metadata:
    local = config.rope("sliding_attention").theta
    if not config.has("rope_parameters"):
        local = config.number("local_rope_theta", default=10000.0)
    return {
        **_metadata(d),
        **blocks.layer_norm_epsilon(config, "norm_eps"),
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
    blocks.require(config, hidden_activation="gelu", norm_bias=False)
    blocks.require(config, attention_bias=False, mlp_bias=False)
    period = config.integer("global_attn_every_n_layers", default=3)
    kinds = ["sliding_attention" if i % period else "full_attention" for i in range(d.n_layers)]
    blocks.require(config, layer_types=kinds)


MODERN_BERT = Family(
    architecture="modern-bert",
    names=("ModernBertModel", "ModernBertForMaskedLM"),
    rules={
        "embeddings.tok_embeddings.weight": Rule("token_embd.weight", shapes.by_token),
        "embeddings.norm.weight": blocks.norm("token_embd_norm"),
        "final_norm.weight": blocks.norm("output_norm"),
        # The first layer has no norm: its input is normed already.
        "layers.{i}.attn_norm.weight": blocks.norm("blk.{i}.attn_norm", optional=True),
        "layers.{i}.attn.Wqkv.weight": Rule("blk.{i}.attn_qkv.weight", shapes.three_squares),
        "layers.{i}.attn.Wo.weight": Rule("blk.{i}.attn_output.weight", shapes.square),
        "layers.{i}.mlp_norm.weight": blocks.norm("blk.{i}.ffn_norm"),
        "layers.{i}.mlp.Wi.weight": Rule("blk.{i}.ffn_up.weight", shapes.gate_and_up),
        "layers.{i}.mlp.Wo.weight": Rule("blk.{i}.ffn_down.weight", shapes.down),
    },
    metadata=_modern_bert,
    dims=_bert_dims,
    roots=("", "model."),
    head="none",
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*"),
    check=_check_modern_bert,
)

FAMILIES = (BERT, XLM_ROBERTA, NOMIC_BERT, MODERN_BERT)
