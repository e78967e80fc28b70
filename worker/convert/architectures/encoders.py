"""Encoders, for embeddings and reranking: BERT, XLM-RoBERTa, nomic-bert and ModernBERT."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks
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


def _metadata(config: Config, d: Dims) -> Metadata:
    return {
        Keys.LLM.BLOCK_COUNT: d.n_layers,
        Keys.LLM.CONTEXT_LENGTH: d.n_positions,
        Keys.LLM.EMBEDDING_LENGTH: d.n_embd,
        Keys.LLM.FEED_FORWARD_LENGTH: d.n_ff,
        Keys.Attention.HEAD_COUNT: d.n_head,
        Keys.Attention.CAUSAL: False,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
    }


def _bert(config: Config, d: Dims) -> Metadata:
    found: Metadata = {
        **_metadata(config, d),
        **blocks.layer_norm_epsilon(config, "layer_norm_eps", default=1e-12),
        Keys.Tokenizer.TOKEN_TYPE_COUNT: config.integer("type_vocab_size", default=1),
    }
    if "SequenceClassification" in str(config.values.get("architectures")):
        found[Keys.LLM.POOLING_TYPE] = 4
    return found


def _check_bert(config: Config, d: Dims) -> None:
    blocks.require(config, "hidden_act", "gelu")
    blocks.require(config, "position_embedding_type", "absolute")
    if "SequenceClassification" in str(config.values.get("architectures")):
        if len(config.section("id2label").values) > 1:
            raise ModelError(f"{config.name}: a classifier of several labels cannot be converted")


def _bert_rules() -> Rules:
    def square(d: Dims) -> tuple[int, ...]:
        return (d.n_embd, d.n_embd)

    attention = f"{_LAYER}.attention"
    return {
        "embeddings.word_embeddings.weight": Rule(
            "token_embd.weight", lambda d: (d.n_vocab, d.n_embd)
        ),
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
        **blocks.linear(f"{attention}.self.query", "blk.{i}.attn_q", square),
        **blocks.linear(f"{attention}.self.key", "blk.{i}.attn_k", square),
        **blocks.linear(f"{attention}.self.value", "blk.{i}.attn_v", square),
        **blocks.linear(f"{attention}.output.dense", "blk.{i}.attn_output", square),
        **blocks.layer_norm(f"{attention}.output.LayerNorm", "blk.{i}.attn_output_norm"),
        **blocks.linear(
            f"{_LAYER}.intermediate.dense", "blk.{i}.ffn_up", lambda d: (d.n_ff, d.n_embd)
        ),
        **blocks.linear(f"{_LAYER}.output.dense", "blk.{i}.ffn_down", lambda d: (d.n_embd, d.n_ff)),
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
        "classifier.dense.weight": Rule("cls.weight", lambda d: (d.n_embd, d.n_embd), True),
        "classifier.dense.bias": Rule("cls.bias", blocks.vector, optional=True),
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


def _nomic(config: Config, d: Dims) -> Metadata:
    config = _nomic_config(config)
    return {
        **_metadata(config, d),
        **blocks.layer_norm_epsilon(config, "layer_norm_eps", default=1e-12),
        Keys.Rope.FREQ_BASE: config.rope(default_theta=1000.0).theta,
        Keys.Tokenizer.TOKEN_TYPE_COUNT: config.integer("type_vocab_size", default=2),
    }


def _check_nomic(config: Config, d: Dims) -> None:
    blocks.require_default_rope(config)
    blocks.require(config, "hidden_act", "silu")
    blocks.require(config, "activation_function", "swiglu")
    blocks.require(config, "rotary_emb_fraction", 1.0)
    blocks.require(config, "moe_every_n_layers", 0)
    for key in ("prenorm", "causal", "qkv_proj_bias", "mlp_fc1_bias", "rotary_emb_interleaved"):
        blocks.require(config, key, False)


_NOMIC_LAYER = "encoder.layers.{i}"
NOMIC_BERT = Family(
    architecture="nomic-bert",
    names=("NomicBertModel",),
    rules={
        "embeddings.word_embeddings.weight": Rule(
            "token_embd.weight", lambda d: (d.n_vocab, d.n_embd)
        ),
        "embeddings.token_type_embeddings.weight": Rule(
            "token_types.weight", lambda d: (d.more["n_types"], d.n_embd), keep_f32=True
        ),
        **blocks.layer_norm("emb_ln", "token_embd_norm"),
        f"{_NOMIC_LAYER}.attn.Wqkv.weight": Rule(
            "blk.{i}.attn_qkv.weight", lambda d: (3 * d.n_embd, d.n_embd)
        ),
        f"{_NOMIC_LAYER}.attn.out_proj.weight": Rule(
            "blk.{i}.attn_output.weight", lambda d: (d.n_embd, d.n_embd)
        ),
        **blocks.layer_norm(f"{_NOMIC_LAYER}.norm1", "blk.{i}.attn_output_norm"),
        f"{_NOMIC_LAYER}.mlp.fc11.weight": Rule(
            "blk.{i}.ffn_up.weight", lambda d: (d.n_ff, d.n_embd)
        ),
        f"{_NOMIC_LAYER}.mlp.fc12.weight": Rule(
            "blk.{i}.ffn_gate.weight", lambda d: (d.n_ff, d.n_embd)
        ),
        f"{_NOMIC_LAYER}.mlp.fc2.weight": Rule(
            "blk.{i}.ffn_down.weight", lambda d: (d.n_embd, d.n_ff)
        ),
        **blocks.layer_norm(f"{_NOMIC_LAYER}.norm2", "blk.{i}.layer_output_norm"),
    },
    metadata=_nomic,
    dims=lambda config: _with_types(_bert_dims(_nomic_config(config)), config),
    roots=("", "nomic_bert.", "bert."),
    head="none",
    ignored=(r"((nomic_)?bert\.)?pooler\..*", r"cls\..*"),
    check=_check_nomic,
)


def _modern_bert(config: Config, d: Dims) -> Metadata:
    local = config.rope("sliding_attention").theta
    if not config.has("rope_parameters"):
        local = config.number("local_rope_theta", default=10000.0)
    return {
        **_metadata(config, d),
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
    blocks.require(config, "hidden_activation", "gelu")
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        blocks.require(config, key, False)
    period = config.integer("global_attn_every_n_layers", default=3)
    kinds = ["sliding_attention" if i % period else "full_attention" for i in range(d.n_layers)]
    blocks.require(config, "layer_types", kinds)


MODERN_BERT = Family(
    architecture="modern-bert",
    names=("ModernBertModel", "ModernBertForMaskedLM"),
    rules={
        "embeddings.tok_embeddings.weight": Rule(
            "token_embd.weight", lambda d: (d.n_vocab, d.n_embd)
        ),
        "embeddings.norm.weight": blocks.norm("token_embd_norm"),
        "final_norm.weight": blocks.norm("output_norm"),
        # The first layer has no norm: its input is normed already.
        "layers.{i}.attn_norm.weight": Rule(
            "blk.{i}.attn_norm.weight", blocks.vector, optional=True
        ),
        "layers.{i}.attn.Wqkv.weight": Rule(
            "blk.{i}.attn_qkv.weight", lambda d: (3 * d.n_embd, d.n_embd)
        ),
        "layers.{i}.attn.Wo.weight": Rule(
            "blk.{i}.attn_output.weight", lambda d: (d.n_embd, d.n_embd)
        ),
        "layers.{i}.mlp_norm.weight": blocks.norm("blk.{i}.ffn_norm"),
        "layers.{i}.mlp.Wi.weight": Rule("blk.{i}.ffn_up.weight", lambda d: (2 * d.n_ff, d.n_embd)),
        "layers.{i}.mlp.Wo.weight": Rule("blk.{i}.ffn_down.weight", lambda d: (d.n_embd, d.n_ff)),
    },
    metadata=_modern_bert,
    dims=_bert_dims,
    roots=("", "model."),
    head="none",
    ignored=(r"head\..*", r"decoder\..*", r"classifier\..*"),
    check=_check_modern_bert,
)

FAMILIES = (BERT, XLM_ROBERTA, NOMIC_BERT, MODERN_BERT)
